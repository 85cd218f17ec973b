"""What acts on units between steps."""
