"""Optimizers that need whole matrices, over shards (`step_on_matrices`)."""
