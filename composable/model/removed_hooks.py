"""Whether our hooks still stand on modules: users do clear hooks. Knows no unit."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, contains
from typing import Final

from torch import nn

from composable.errors import HooksRemovedError
from composable.model.hooks import dispatcher_of

_pre_hooks: Final = attrgetter("_forward_pre_hooks")
_hooks: Final = attrgetter("_forward_hooks")
_NO_HOOKS: Final = (-1, -1)  # keys that no module has


class HookWatch:
    """Tells quickly whether our hooks still stand on some modules; users do clear hooks."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._watched = tuple(modules)
        keys = [dispatcher.keys if (dispatcher := dispatcher_of(module)) else _NO_HOOKS for module in self._watched]
        self._before = tuple([before for before, _ in keys])
        self._after = tuple([after for _, after in keys])

    def all_attached(self) -> bool:
        """Whether every module has the hooks that it had when this was made, and had them then."""
        before = all(map(contains, map(_pre_hooks, self._watched), self._before))
        return before and all(map(contains, map(_hooks, self._watched), self._after))


def refuse_removed_hooks(modules: Iterable[nn.Module], unit: str) -> None:
    """Raise when somebody removed our hooks from one of a unit's modules."""
    for module in modules:
        dispatcher = dispatcher_of(module)
        if dispatcher is None or not dispatcher.attached_to(module):
            raise HooksRemovedError(
                f"the hooks of unit '{unit}' were removed from its module ({type(module).__name__}); without them "
                "its parameters are never gathered. Leave hooks alone that you did not register; to annotate again, "
                "call remove(module, fully_shard) first."
            )
