"""Parameters of units: how they are stored, gathered and cast."""
