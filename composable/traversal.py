"""Public traversal of annotated modules; see `composable.contract.tree`."""

from composable.contract.tree import (
    get_fully_sharded_modules,
    get_handles,
    get_root_states,
    get_states,
)

__all__ = ["get_fully_sharded_modules", "get_handles", "get_root_states", "get_states"]
