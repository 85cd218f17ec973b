"""How often optimizers have stepped in this process; knows neither optimizers nor parameters.

Note [Stale parameters]
What was gathered is a copy, and must not be computed with after the shards have changed. Version counters do not tell: an
in-place operation on a DTensor bumps the counter of the wrapper, one on its local tensor another, and `foreach` and `fused`
optimizers bump none. So three signs count, each enough: a counter changed, any optimizer stepped, a backward ended.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0


def optimizer_steps() -> int:
    """Steps of any `torch.optim` optimizer so far."""
    return _steps


def _count(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count)
