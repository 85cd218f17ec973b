"""Which modules the user means: rules that pick modules out of a tree.

For every verb, one object maps a root to modules and keyword overrides. This idea is from
https://github.com/pytorch/pytorch/pull/104969.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap
from typing_extensions import override

from composable.checked import ELSEWHERE, PositiveInt, checked, is_function, takes
from composable.errors import PolicyError, describe_module, few, kind_of, what_is_there

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
            by_name = f"; for names of modules, use NamePolicy({{{item!r}: {{}}}})"
            hint = by_name if isinstance(item, str) else ""
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


class ModuleWrapPolicy(Policy):
    """Every module that is an instance of one of `classes`, or of their subclasses.

    Args:
        classes: a class, or several; subclasses of `nn.Module`.

    Raises:
        PolicyError: something in `classes` is not a class of modules.

    Example::

        fully_shard(model, policy=ModuleWrapPolicy({Block, Embedding}))

    The name and the rule are those of `torch.distributed.fsdp.wrap.ModuleWrapPolicy`.
    """

    def __init__(self, classes: type[nn.Module] | Iterable[type[nn.Module]]) -> None:
        self.classes = as_classes(classes, "ModuleWrapPolicy takes classes of modules")

    @override
    def select(self, root: nn.Module) -> Selection:
        picked: Selection = {
            module: {} for module in root.modules() if isinstance(module, self.classes)
        }
        return not_empty(picked, root)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({', '.join(cls.__name__ for cls in self.classes)})"


class CustomPolicy(Policy):
    """Every module for which a function says so.

    Args:
        decide: takes a module. It returns True to select the module, a dict to select it with these
            keyword overrides, or False. It is called once for every module, in the order of
            `.modules()`.

    Raises:
        PolicyError: `decide` cannot be called with one argument; in `select`, it returns anything
            else.

    Example::

        def by_kind(module):
            if module is model.head:
                return {"reshard_after_forward": False}
            return isinstance(module, Block)

        fully_shard(model, policy=CustomPolicy(by_kind))

    The name and the rule are those of `torch.distributed.fsdp.wrap.CustomPolicy`.
    """

    def __init__(self, decide: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not is_function(decide):
            raise PolicyError(
                f"CustomPolicy: decide must be a function of a module, got {kind_of(decide)}"
            )
        if not takes(decide, 1):
            raise PolicyError(
                "a policy's function takes one argument, the module; this one takes"
                f" {inspect.signature(decide)}. For an auto-wrap policy of FSDP1, use"
                " ModuleWrapPolicy or SizePolicy"
            )
        self.decide = decide

    @override
    def select(self, root: nn.Module) -> Selection:
        picked: Selection = {}
        for fqn, module in root.named_modules():
            answer: Any = self.decide(module)
            if isinstance(answer, dict):
                picked[module] = dict(answer)
            elif not isinstance(answer, bool):
                raise PolicyError(
                    f"the policy's function returned {kind_of(answer)} for"
                    f" {describe_module(module, fqn)}; it must return True, False or a dict of"
                    " keyword overrides"
                )
            elif answer:
                picked[module] = {}
        return not_empty(picked, root)

    def __repr__(self) -> str:
        return f"CustomPolicy({getattr(self.decide, '__qualname__', type(self.decide).__name__)})"


class SizePolicy(Policy):
    """Modules that are large enough, from the bottom up.

    The policy goes from the leaves to the root. It selects a module if its parameters, without
    those of modules already selected below, have at least `min_num_params` elements. A parameter
    that is registered in several places counts once, at the first place. Containers without a
    forward (`ModuleList`, `ModuleDict`) are never selected. Their parameters count for the module
    above.

    Args:
        min_num_params: elements, not bytes.
        force_leaf: classes that are selected as a whole or not at all. The policy does not look
            below them. `MultiheadAttention` is one of them, because it reads the parameters of its
            `out_proj` without calling it.
        exclude: classes that are never selected themselves. Modules below them may be selected.

    Raises:
        ArgumentError: an argument is not as described.
        PolicyError: in `select`, no module is large enough.

    Example::

        fully_shard(model, policy=SizePolicy(10_000_000))

    The rule is that of FairScale's `auto_wrap` and of
    `torch.distributed.fsdp.wrap.size_based_auto_wrap_policy`.
    """

    FORCE_LEAF: Final = (nn.MultiheadAttention,)

    @checked
    def __init__(
        self,
        min_num_params: PositiveInt,
        *,
        force_leaf: type[nn.Module] | Iterable[type[nn.Module]] = FORCE_LEAF,
        exclude: type[nn.Module] | Iterable[type[nn.Module]] = (),
    ) -> None:
        self.min_num_params = min_num_params
        self.force_leaf = as_classes(force_leaf, "force_leaf= takes classes of modules")
        self.exclude = as_classes(exclude, "exclude= takes classes of modules")

    @override
    def select(self, root: nn.Module) -> Selection:
        large: set[int] = set()
        counted: set[int] = set()  # modules and parameters: each counts once, at its first place

        def left_over(module: nn.Module) -> int:
            """Count the elements at or below `module` that it leaves to the module above."""
            if id(module) in counted:
                return 0
            counted.add(id(module))
            is_leaf = isinstance(module, self.force_leaf)
            elements = 0
            for parameter in module.parameters(recurse=is_leaf):
                if id(parameter) not in counted:
                    counted.add(id(parameter))
                    elements += parameter.numel()
            if not is_leaf:
                elements += sum(left_over(child) for child in module.children())
            if (
                elements < self.min_num_params
                or isinstance(module, self.exclude)
                or is_container(module)
            ):
                return elements
            large.add(id(module))
            return 0

        total = left_over(root)
        picked: Selection = {module: {} for module in root.modules() if id(module) in large}
        if not picked:
            raise PolicyError(
                f"policy matched 0 modules; SizePolicy({self.min_num_params}) found none that"
                f" large, and {describe_module(root)} has {total} elements in all"
            )
        return picked

    def __repr__(self) -> str:
        return f"SizePolicy({self.min_num_params})"


class NamePolicy(Policy):
    """Modules whose FQN matches a glob.

    `*`, `?` and `[...]` match within one part of the name, as in paths: `blocks.*` matches every
    block, but no module inside a block. `**` matches any number of parts: `**.mlp` matches every
    `mlp` at any depth. The root's FQN is empty. A module that is registered in several places has
    several FQNs, and any of them may match.

    Args:
        patterns: maps globs to keyword overrides for the modules that they match. True, None and
            `{}` mean no overrides. If several globs match a module, their overrides are merged. For
            the same keyword, the later glob wins.

    Raises:
        PolicyError: an argument is not as described; in `select`, a glob matches nothing.

    Example::

        fully_shard(model, policy=NamePolicy({"blocks.*": True, "blocks.11":
        {"reshard_after_forward": False}}))
    """

    def __init__(
        self, patterns: Mapping[str, Mapping[str, Any] | bool | None] | Iterable[str] | str
    ) -> None:
        if isinstance(patterns, str):
            patterns = (patterns,)
        if not isinstance(patterns, Iterable):
            raise PolicyError(
                f"NamePolicy: patterns must be a dict of globs, got {kind_of(patterns)}"
            )
        given: Mapping[Any, Any] = (
            patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
        )
        self.patterns: dict[str, dict[str, Any]] = {}
        for pattern, overrides in given.items():
            if not isinstance(pattern, str):
                raise PolicyError(
                    f"NamePolicy: patterns must be globs, got {kind_of(pattern)} as a key;"
                    " for overrides by class, use CustomPolicy with a function"
                )
            if overrides is None or overrides is True:
                overrides = {}
            if not isinstance(overrides, Mapping):
                raise PolicyError(
                    f"NamePolicy got {kind_of(overrides)} for '{pattern}'; it takes a dict of"
                    " overrides, or True"
                )
            self.patterns[pattern] = dict(overrides)

    @override
    def select(self, root: nn.Module) -> Selection:
        named = list(by_all_names(root))
        matches: dict[str, set[int]] = {}
        for pattern in self.patterns:
            parts = _parts(pattern)
            matches[pattern] = {id(module) for fqn, module in named if _match(parts, _parts(fqn))}
            if not matches[pattern]:
                there = what_is_there(pattern, [fqn for fqn, _ in named if fqn])
                raise PolicyError(f"pattern '{pattern}' matched no module; {there}")
        picked: Selection = {}
        for module in root.modules():
            for pattern, overrides in self.patterns.items():
                if id(module) in matches[pattern]:
                    picked.setdefault(module, {}).update(overrides)
        return picked

    def __repr__(self) -> str:
        return f"NamePolicy({', '.join(self.patterns)})"


class ModelPolicy(Policy):
    """The modules that a model of transformers names as its units.

    The policy reads the model's plan for FSDP2 (`_fsdp_plan`: names, with `*` for numbers). If the
    plan names no layers, it reads the classes that transformers does not split
    (`_no_split_modules`). If both are empty, as for many speech models, layers that repeat in a
    list are the units.

    Some modules stay in the outermost unit. These are the modules that the plan keeps unsharded
    until backward (the last norm and the head), because the outermost unit does this, and modules
    whose parameters are also registered elsewhere (tied embeddings).

    Args:
        module: the model that names its units. It may be inside the module that you annotate.

    Raises:
        PolicyError: the model names no units; in `select`, none of the named modules exists.

    Example::

        model = AutoModelForCausalLM.from_config(config)
        fully_shard(model, policy=model)

    The plan is that of transformers' own distribution; accelerate reads `_no_split_modules`.
    """

    @checked
    def __init__(self, module: nn.Module) -> None:
        plan: Any = getattr(module, "_fsdp_plan", None) or {}
        self.classes: list[str] = sorted(getattr(module, "_no_split_modules", None) or ())
        # transformers' base class has the attribute, which is None where a model does not fill it
        self.layers: list[nn.Module] = []
        if not (plan or self.classes) and hasattr(module, "_no_split_modules"):
            self.layers = [each for alike in layers_in_lists(module).values() for each in alike]
        if not isinstance(plan, Mapping) or not (plan or self.classes or self.layers):
            raise PolicyError(
                f"policy= got {describe_module(module)}, which does not say what its units are: it"
                " has no _no_split_modules and no _fsdp_plan, as models of transformers have."
                " Pass the class of its layers, policy={Block}"
            )
        self.model = module
        self.names = [name for name, how in plan.items() if how != "keep_full_weight"]

    @override
    def select(self, root: nn.Module) -> Selection:
        named: defaultdict[str, list[nn.Module]] = defaultdict(list)
        for fqn, module in self.model.named_modules():
            name = ".".join("*" if part.isdigit() else part for part in _parts(fqn))
            named[name].append(module)
        found = [*self.layers, *(module for name in self.names for module in named[name])]
        if not any(named[name] for name in self.names if "*" in name):
            found += [m for m in self.model.modules() if type(m).__name__ in self.classes]
        chosen = {id(module) for module in found if not _shares_parameters(module, self.model)}
        picked: Selection = {module: {} for module in root.modules() if id(module) in chosen}
        if not picked:
            raise PolicyError(
                f"policy matched 0 modules; {describe_module(self.model)} names"
                f" {few([*self.names, *self.classes]) or 'layers'}, and none of them is in the"
                f" {type(root).__name__}"
            )
        return picked

    def __repr__(self) -> str:
        return f"ModelPolicy({type(self.model).__name__})"


def _shares_parameters(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of `module` is registered outside of it, too."""
    own = {id(parameter) for parameter in module.parameters()}
    below = {id(each) for each in module.modules()}
    return any(
        id(parameter) in own
        for other in model.modules()
        if id(other) not in below
        for parameter in other.parameters(recurse=False)
    )


def _parts(name: str) -> list[str]:
    return name.split(".") if name else []


def _match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    head, *rest = pattern
    if head == "**":
        return any(_match(rest, name[start:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], head) and _match(rest, name[1:])


PolicyLike = Annotated[
    Policy
    | nn.Module
    | type[nn.Module]
    | Collection[type[nn.Module]]
    | Mapping[str, Mapping[str, Any] | bool | None]
    | Callable[[nn.Module], bool | dict[str, Any]],
    ELSEWHERE,  # by `as_policy`
]


def as_policy(value: PolicyLike) -> Policy:
    """Make a policy of a policy or of a shorthand.

    The shorthands are classes (also in torch's own `ModuleWrapPolicy`) for `ModuleWrapPolicy`, a
    dict of globs for `NamePolicy`, a function for `CustomPolicy`, a model for `ModelPolicy`.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, Mapping):
        return NamePolicy(value)
    if isinstance(value, (type, set, frozenset, tuple, list)):
        return ModuleWrapPolicy(as_classes(value, "policy= takes classes of modules"))
    if isinstance(value, nn.Module):
        return ModelPolicy(value)
    given: Any = value
    # called with recurse=False, it says whether it picks a module
    if isinstance(given, torch_wrap.ModuleWrapPolicy):
        return CustomPolicy(lambda module: bool(given(module, recurse=False)))
    if callable(value):
        return CustomPolicy(value)
    raise PolicyError(
        "policy= takes a Policy, a set of classes, a dict of globs, a function of a module or a"
        f" model that names its units, and got {kind_of(value)}"
    )


def select_modules(policy: PolicyLike, root: nn.Module) -> Selection:
    """Return what `policy` picks among `root` and the modules below it, for the verbs.

    The modules are checked, and in the order of `.modules()`.
    """
    rule = as_policy(policy)
    answer: Any = rule.select(root)
    source = f"{type(rule).__name__}.select"
    if not isinstance(answer, Mapping):
        raise PolicyError(
            f"{source} returned {kind_of(answer)}; it must return a dict of modules and overrides"
        )
    names = {id(module): fqn for fqn, module in root.named_modules()}
    for module, overrides in answer.items():
        if id(module) not in names:
            raise PolicyError(
                f"{source} returned {kind_of(module)}, which is no module of the"
                f" {type(root).__name__}"
            )
        if not isinstance(overrides, Mapping):
            what = describe_module(module, names[id(module)])
            raise PolicyError(
                f"{source} returned {kind_of(overrides)} for {what}, not a dict of overrides"
            )
    return not_empty(
        {module: dict(answer[module]) for module in root.modules() if module in answer}, root
    )
