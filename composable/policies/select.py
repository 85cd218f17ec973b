"""Check the `policy=` argument of a verb, and find the modules that it picks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from composable.checked import ELSEWHERE
from composable.errors import PolicyError, describe_module, kind_of
from composable.policies.base import Policy, Selection, as_classes, not_empty
from composable.policies.rules import CustomPolicy, ModelPolicy, ModuleWrapPolicy, NamePolicy

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
    """A policy, from a policy or from one of its shorthands: classes (also in torch's own
    `ModuleWrapPolicy`) for `ModuleWrapPolicy`, a dict of globs for `NamePolicy`, a function for
    `CustomPolicy`, a model for `ModelPolicy`.
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
        " model that names its units, and"
        f" got {kind_of(value)}"
    )


def select_modules(policy: PolicyLike, root: nn.Module) -> Selection:
    """What `policy` picks among `root` and what is below it, checked, in the order of `.modules()`:
    this is what verbs call.
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
