"""Annotated modules of a tree, in order, and which annotation manages which parameter.

The order is left-to-right depth-first, that of `.modules()`. It is the same on every rank, and the
same for annotations by hand and by a policy. Every function visits each module once, also in trees
with cycles or shared modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from torch import Tensor, nn

from composable.contract.contract import Annotation, records_of

SHARD: Final = "fully_shard"
REPLICATE: Final = "replicate"

T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True, slots=True)
class Place:
    """One registration of a parameter or a buffer: the module, the name in it, and the FQN."""

    module: nn.Module
    name: str
    fqn: str = field(default="", compare=False)

    @property
    def registered(self) -> nn.Parameter | None:
        """The parameter that is registered here now."""
        return self.module._parameters.get(self.name)

    def register(self, parameter: nn.Parameter) -> None:
        """Register `parameter`, unless the place was deleted or set to None."""
        if self.registered is not None:
            setattr(self.module, self.name, parameter)


@dataclass(frozen=True, slots=True)
class Managed(Generic[T]):
    """A parameter or a buffer that an annotation manages, with all its registrations.

    It has several registrations if it is tied.
    """

    tensor: T
    places: tuple[Place, ...]

    @property
    def fqn(self) -> str:
        """The name of the first of them."""
        return self.places[0].fqn


def annotation_of(module: nn.Module) -> Annotation | None:
    """Return the annotation of `module` itself by one of the verbs; None if it has none."""
    annotations = records_of(module)
    return annotations.get(SHARD) or annotations.get(REPLICATE)


def states_below(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the states of both verbs on `modules` and below, in `.modules()` order."""
    below = (annotation_of(module) for top in modules for module in top.modules())
    return list({id(each.state): each.state for each in below if each is not None}.values())


def walk(
    root: nn.Module, prefix: str = "", *, stop: Collection[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """FQN and module for `root` and the modules below it, each once.

    Modules annotated with one of the verbs `stop` are left out with all below them, except for
    `root` itself.
    """
    seen: set[int] = set()
    pending = [(prefix, root)]
    while pending:
        fqn, module = pending.pop()
        if id(module) in seen:
            continue
        if stop and module is not root and not records_of(module).keys().isdisjoint(stop):
            continue
        seen.add(id(module))
        yield fqn, module
        for name, child in reversed(module._modules.items()):
            if child is not None and id(child) not in seen:
                pending.append((f"{fqn}.{name}" if fqn else name, child))


def names_below(root: nn.Module) -> Mapping[int, str]:
    """Return the FQN of `root` and of every module below it, by the module's id."""
    return {id(module): fqn for fqn, module in walk(root)}


def registered_parameters(
    root: nn.Module, prefix: str = "", stop: Collection[str] = (REPLICATE,)
) -> Iterator[tuple[Place, nn.Parameter]]:
    """Yield every registration of a parameter in `root` and below.

    Subtrees annotated with one of `stop` are left out.
    """
    return _registered("_parameters", root, prefix, stop)


def _registered(
    table: str, root: nn.Module, prefix: str, stop: Collection[str]
) -> Iterator[tuple[Place, Any]]:
    for fqn, module in walk(root, prefix, stop=stop):
        for name, tensor in getattr(module, table).items():
            if tensor is not None:
                yield Place(module, name, f"{fqn}.{name}" if fqn else name), tensor


def managed_parameters(
    modules: Sequence[nn.Module], *, ignored: Collection[int] = ()
) -> list[Managed[nn.Parameter]]:
    """Return the parameters below `modules` that no annotation below them manages.

    Parameters whose ids are in `ignored` are left out. Names in one of several modules begin with
    its index.
    """
    return _managed("_parameters", modules, ignored)


def managed_buffers(
    modules: Sequence[nn.Module], *, ignored: Collection[int] = ()
) -> list[Managed[Tensor]]:
    """Return the buffers of `modules`, persistent or not.

    Buffers in annotated modules below them are left out, and those whose ids are in `ignored`.
    """
    return _managed("_buffers", modules, ignored)


def _managed(
    table: str, modules: Sequence[nn.Module], ignored: Collection[int]
) -> list[Managed[Any]]:
    found: dict[int, tuple[Any, dict[Place, None]]] = {}
    for index, root in enumerate(modules):
        prefix = "" if len(modules) == 1 else str(index)
        for place, tensor in _registered(table, root, prefix, stop=(SHARD, REPLICATE)):
            if id(tensor) not in ignored:
                found.setdefault(id(tensor), (tensor, {}))[1][place] = None
    return [Managed(tensor, tuple(places)) for tensor, places in found.values()]


class TreeWatch:
    """Whether the modules below `root`, or their number of parameters, have changed.

    Modules have changed if some were added, removed or exchanged. The comparison runs in C: the
    engine makes it before every root forward.
    """

    def __init__(self, root: nn.Module) -> None:
        modules = [module for _, module in walk(root)]
        self._children = [module._modules.values() for module in modules]  # live views
        self._parameters = [module._parameters for module in modules]
        self._before = self._now()

    def _now(self) -> tuple[list[nn.Module | None], int]:
        return list(chain.from_iterable(self._children)), sum(map(len, self._parameters))

    def changed(self) -> bool:
        """Compare with what was there when this object was made."""
        return self._before != self._now()
