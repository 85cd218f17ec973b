"""Optimizers over annotated models.

Clipping, gradient scalers, steps on local shards, steps in backward, checks of steps. Importing
this package registers the hooks of `step_checks` and `scaler` with torch.
"""

from composable.optim import scaler, step_checks

__all__ = ["scaler", "step_checks"]
