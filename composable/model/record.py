"""The record of one annotation, and how it is copied, pickled and taken back; not who makes it or when."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from composable.errors import AnnotationError
from composable.model.transaction import Transaction, to_its_end

KEY: Final = "_composable_annotations"  # the one attribute of a module that holds its records, by the verb's name


@dataclass(frozen=True, slots=True)
class NotCarried:
    """Stands in a pickled record for an argument that cannot be pickled."""

    description: str


class Annotation:
    """What one call of a verb said about a module.

    Attributes:
        name: of the verb.
        call_site: file and line of the call, as in `train.py:41`.
        fqn: of the module, or of the first of several that were annotated as one, if it was known at the call.
        state: what the verb keeps; see `contract`.
    """

    __slots__ = ("_kwargs", "_modules", "_nested", "_undo", "call_site", "fqn", "name", "state")

    def __init__(self, done: Transaction, kwargs: Mapping[str, Any], fqn: str | None) -> None:
        self.name = done.name
        self.call_site = done.call_site
        self.fqn = fqn
        self.state = done.state
        self._kwargs = dict(kwargs)
        # A module that was annotated alone is not referred to from its own record: no cycle keeps it alive.
        self._modules = done.modules if len(done.modules) > 1 else ()
        self._nested = done.nested
        self._undo: ExitStack | None = done.undo  # None in a copy

    @property
    def place(self) -> str:
        """`call_site`, under the name that it had first."""
        return self.call_site

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The call's arguments, as they were given."""
        return MappingProxyType(self._kwargs)

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self._kwargs.items() if not _holds_modules(value))
        return f"<{self.name}({given}) at {self.call_site}>"

    def states(self) -> Iterator[Any]:
        """What this verb keeps, and what those keep that it called."""
        yield self.state
        for _, record in self._nested:
            yield from record.states()

    # --- taking it back -----------------------------------------------------------------------------------------------

    def put_on(self, module: nn.Module) -> None:
        # Another mapping each time: who remembers the one from before can put it back.
        vars(module)[KEY] = {**vars(module).get(KEY, {}), self.name: self}

    def is_on(self, module: nn.Module) -> bool:
        return vars(module).get(KEY, {}).get(self.name) is self

    def undo_on(self, module: nn.Module) -> None:
        """Undo the annotation, here and on the modules that were annotated with `module`; nothing if it is gone.

        Raises:
            AnnotationError: this is a copy, and the state of the verb has no `undo`. Nothing is changed then.
        """
        if not self.is_on(module):
            return
        self.check_removable(module)
        to_its_end(partial(self._undo_on, module))

    def check_removable(self, module: nn.Module) -> None:
        """Raise if this is a copy that cannot be undone."""
        if self._undo is None:
            self._check_state_undoes(module)

    def _undo_on(self, module: nn.Module) -> None:
        with ExitStack() as stack:
            stack.callback(to_its_end, partial(self._leave, module))
            if self._undo is not None:
                stack.push(self._undo)
            else:
                for other, record in self._nested:
                    stack.callback(record.undo_on, other)
                stack.callback(self.state.undo, module)

    def _leave(self, module: nn.Module) -> None:
        for other in self._modules or (module,):
            records = {name: record for name, record in vars(other).get(KEY, {}).items() if name != self.name}
            if records:
                vars(other)[KEY] = records
            else:
                vars(other).pop(KEY, None)

    def _check_state_undoes(self, module: nn.Module) -> None:
        if not self.is_on(module):
            return
        if not callable(getattr(self.state, "undo", None)):
            raise AnnotationError(
                f"{self.name} cannot be removed from a copy of a module: its state, a {type(self.state).__name__}, "
                "has no undo(module). Remove it before copying, or copy a module that was never annotated"
            )
        for other, record in self._nested:
            record._check_state_undoes(other)

    # --- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Annotation:
        twin = Annotation.__new__(Annotation)
        memo[id(self)] = twin  # first of all: the state may lead back here
        twin.name, twin.call_site, twin.fqn, twin._undo = self.name, self.call_site, self.fqn, None
        twin._modules = copy.deepcopy(self._modules, memo)
        twin._nested = copy.deepcopy(self._nested, memo)
        twin._kwargs = {key: _copied(value, memo) for key, value in self._kwargs.items()}
        twin.state = copy.deepcopy(self.state, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "call_site": self.call_site,
            "fqn": self.fqn,
            "state": self.state,
            "_kwargs": {key: _portable(value) for key, value in self._kwargs.items()},
            "_modules": self._modules,
            "_nested": self._nested,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            setattr(self, key, value)
        self._undo = None


def _holds_modules(value: Any) -> bool:
    """Whether `value` is, or contains, parts of the model: they must be the parts of the copy in a copy."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_modules(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_modules(item) for pair in value.items() for item in pair)
    return isinstance(value, (nn.Module, Tensor))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    # Everything else was given by the caller and is shared: meshes, policies and the like are not ours to copy.
    return copy.deepcopy(value, memo) if _holds_modules(value) else value


def _portable(value: Any) -> Any:
    if _holds_modules(value):
        return value  # pickled with the model, as it must be the model's own; a trial of its own would not end
    try:
        pickle.dumps(value)
    except Exception as error:
        return NotCarried(f"{type(value).__name__} ({error})")
    return value
