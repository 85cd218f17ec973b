"""The public way to `model/traversal.py`: who is fully sharded, by which handle, in which order."""

from composable.model.traversal import get_fully_sharded_modules, get_handles, get_root_states, get_states

__all__ = ["get_fully_sharded_modules", "get_handles", "get_root_states", "get_states"]
