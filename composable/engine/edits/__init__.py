"""Actions on units between steps."""
