"""One step: units, their root, and its order."""
