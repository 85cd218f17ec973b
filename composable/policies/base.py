"""What a policy is, and what all policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from composable.errors import PolicyError, few, kind_of

Selection = dict[nn.Module, dict[str, Any]]


class Policy(ABC):
    """A rule for which modules to annotate. The same policy works for every verb.

    To write your own policy, derive from this class and define `select`.

    Example::

        class EveryOther(Policy):
            def select(self, root):
                return {block: {} for block in root.blocks[::2]}

        checkpoint(model, policy=EveryOther())
    """

    @abstractmethod
    def select(self, root: nn.Module) -> Selection:
        """Pick the modules below and including `root` to annotate.

        Args:
            root: the module that the verb was called with; it is a candidate itself.

        Returns:
            Maps each selected module to the keyword arguments that replace those of the verb's
            call.

        Raises:
            PolicyError: no module is selected, or the policy does not fit the tree.
        """


def not_empty(picked: Selection, root: nn.Module) -> Selection:
    """Return `picked`, or raise an error that lists the classes present, and what would do."""
    if picked:
        return picked
    present = [
        f"{cls.__name__} x{count}" for cls, count in Counter(map(type, root.modules())).items()
    ]
    units = repeated_modules(root)
    hint = f"; modules that repeat make good units: {few(units, limit=4)}" if units else ""
    raise PolicyError(f"policy matched 0 modules; classes present: {few(present, limit=12)}{hint}")


def repeated_modules(root: nn.Module) -> list[str]:
    """Name the outermost modules of one class that repeat in a list: `Block x12 ('blocks.*')`."""
    return [
        f"{name} x{len(modules)} ('{pattern}')"
        for (pattern, name), modules in layers_in_lists(root).items()
    ]


def layers_in_lists(root: nn.Module) -> dict[tuple[str, str], list[nn.Module]]:
    """Find the outermost modules of one class that repeat in a list, by pattern and class."""
    found: defaultdict[tuple[str, str], list[nn.Module]] = defaultdict(list)
    for fqn, module in root.named_modules():
        pattern = ".".join("*" if part.isdigit() else part for part in fqn.split("."))
        trains = any(True for _ in module.parameters())
        if pattern.endswith("*") and trains and not is_container(module):
            found[pattern, type(module).__name__].append(module)
    repeated = {key: modules for key, modules in found.items() if len(modules) > 1}
    return {
        key: modules
        for key, modules in repeated.items()
        if not any(key[0].startswith(f"{outer}.") for outer, _ in repeated)
    }


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward, as `ModuleList` and `ModuleDict`."""
    forward: Any = getattr(module.forward, "__func__", None)
    return forward is nn.Module.forward


def as_classes(value: Any, takes: str) -> tuple[type[nn.Module], ...]:
    """Check a class of modules, or several."""
    if isinstance(value, type):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (str, nn.Module)):
        raise PolicyError(f"{takes}, and got {kind_of(value)}")
    found = list(value)
    for item in found:
        if not isinstance(item, type) or not issubclass(item, nn.Module):
            hint = (
                f"; for names of modules, use NamePolicy({{{item!r}: {{}}}})"
                if isinstance(item, str)
                else ""
            )
            raise PolicyError(f"{takes}, and got {kind_of(item)}{hint}")
    # A set has no order of its own; sorted, messages are the same on every rank.
    return tuple(sorted(dict.fromkeys(found), key=lambda cls: (cls.__module__, cls.__qualname__)))


def by_all_names(
    module: nn.Module, prefix: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and those below it, a shared one by each of its names.

    A child that is also around ends there: heads may know the agent that they belong to. torch's
    `named_modules(remove_duplicate=False)` does not end then.
    """
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and child is not module and child not in around:
            below = f"{prefix}.{name}" if prefix else name
            yield from by_all_names(child, below, (*around, module))
