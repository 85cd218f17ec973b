"""Parameters of units: how they rest, travel and compute."""
