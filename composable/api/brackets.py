"""What `checkpoint` and `offload_activations` have in common: a bracket around the forward of each
module, and policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from composable.api.selection import select_callable
from composable.contract.contract import Verb, modules_of, on_undo, require_callable
from composable.contract.hooks import Bracket, attach, detach
from composable.policies import PolicyLike


def annotate_each(
    verb: Verb[..., Any],
    module: nn.Module | Sequence[nn.Module],
    policy: PolicyLike | None,
    options: Mapping[str, Any],
    make: Callable[[nn.Module], Bracket],
    so: str,
) -> None:
    """The body of both verbs, after the checks of `options`, which a policy may override.

    Args:
        so: what follows from a module having no forward.
    """
    name = verb.__name__
    for top in modules_of(name, module):
        if policy is None:
            require_callable(top, so=so)
            on_undo(partial(detach, top, name))
            attach(top, name, make(top))
        else:
            picked = select_callable(name, policy, top, tuple(options), so=so)
            for chosen, overrides in picked.items():
                verb(chosen, **{**options, **overrides})
