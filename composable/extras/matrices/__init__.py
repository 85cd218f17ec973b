"""Optimizers that need whole matrices, for sharded parameters (`step_on_matrices`)."""
