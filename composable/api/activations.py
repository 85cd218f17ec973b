"""The verbs `checkpoint` and `offload_activations`: a bracket around the forward of each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from torch import nn

from composable.api.arguments import select_callable
from composable.checked import NonNegativeInt, checked
from composable.contract.contract import (
    Target,
    Verb,
    contract,
    known_fqn,
    modules_of,
    on_undo,
    require_callable,
)
from composable.contract.hooks import Bracket, attach, detach
from composable.errors import AnnotationError, describe_module
from composable.features.activations import (
    Contexts,
    OffloadBracket,
    RecomputeBracket,
    RecomputeOptions,
)
from composable.policies import PolicyLike

_FOR_CHECKPOINT: Final = {
    "use_reentrant": (
        "checkpointing is never reentrant here; leave it out, or use"
        " torch.utils.checkpoint.checkpoint"
    ),
    "checkpoint_fn": "context_fn=",
    "check_fn": "policy=",
}
# A link takes some 40 us each way for as much; a round trip costs the host more than 0.1 ms,
# whatever the size.
MIN_BYTES: Final = 1 << 20
_FOR_OFFLOAD: Final = {
    "min_offload_size": "min_bytes=",
    "max_fwd_stash_size": (
        "the last few tensors stay on the device until their copies are made; leave it out"
    ),
    "use_pin_memory": "pin_memory=",
    "use_streams": "copies always have streams of their own; leave it out",
}


@contract(equivalents=_FOR_CHECKPOINT, only_submodules_with="policy")
@checked
def checkpoint(
    module: Target,
    *,
    policy: PolicyLike | None = None,
    preserve_rng_state: bool = True,
    context_fn: Contexts | None = None,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> Target:
    """Drop the activations of `module` after forward and compute them again in backward, in place.

    With a policy, only the modules that it selects are annotated, not `module`. You may call
    `fully_shard` on the same module, before or after. Parameters are then unsharded twice per step:
    once for forward, and once for recomputation and backward together.

    Everything in the module runs twice, including your forward pre-hooks. Your forward hooks run
    twice if the second run reaches the end (`early_stop=False`). Norms with a `running_mean`, such
    as torch's batch norms, count each batch once. If the second run computes something else, torch
    raises `CheckpointError`, and a note on it names the module.

    Args:
        module: a module, or a list of modules that are checkpointed separately.
        policy: which submodules to checkpoint; see `composable.policies`.
        preserve_rng_state: recompute with the random numbers of the forward (dropout).
        context_fn: returns two context managers, one for the forward and one for the recomputation.
            For selective checkpointing, pass
            `partial(create_selective_checkpoint_contexts, ops_to_save)` of torch.utils.checkpoint.
        determinism_check: "default" compares shapes, dtypes and devices of the recomputed tensors.
            "none" does not.
        debug: on a mismatch, show the traces of both runs.
        early_stop: stop the recomputation when it has made every tensor that backward needs.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is already checkpointed, or has no forward; a keyword is
            unknown.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> checkpoint(model, policy={nn.Linear}) is model
        True

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    if debug and context_fn is not None:
        raise AnnotationError(
            "checkpoint: debug=True records with contexts of its own and cannot be given with"
            " context_fn"
        )
    options = RecomputeOptions(preserve_rng_state, context_fn, determinism_check, debug, early_stop)
    so = "there is no forward to run again"
    _annotate_each(
        checkpoint, module, policy, options._asdict(), lambda _: RecomputeBracket(options), so
    )
    return module


@contract(equivalents=_FOR_OFFLOAD, only_submodules_with="policy")
@checked
def offload_activations(
    module: Target,
    *,
    policy: PolicyLike | None = None,
    min_bytes: NonNegativeInt = MIN_BYTES,
    pin_memory: bool = True,
) -> Target:
    """Keep the tensors that `module` saves for backward in the host's memory, in place.

    The tensors stay there until backward needs them. The library copies each tensor to the host
    while forward continues. It copies the tensor back before backward uses it, in the order in
    which backward reads. Shapes, dtypes, strides and values stay the same, bit for bit. A storage
    that several tensors share is copied once. Parameters, their views, buffers, and tensors that
    are not plain and strided stay on the device. Forwards without gradients copy nothing. On a CPU
    nothing is copied, and `describe` says so. With a policy, only the modules that it selects are
    annotated, not `module`.

    You can combine it with `checkpoint`. If `checkpoint` is on the same module (called before or
    after) or on modules inside it, activations are recomputed, and the inputs of the recomputed
    modules are on the host. If `offload_activations` is inside a checkpointed module, its
    activations are on the host, and the rest of the checkpointed module is recomputed.

    Args:
        module: a module, or a list of modules that are offloaded separately.
        policy: which submodules to offload; see `composable.policies`.
        min_bytes: tensors with fewer bytes stay on the device.
        pin_memory: use pinned memory of the host. Without it, the host waits for every copy to the
            host.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is already offloaded or has no forward, a keyword is unknown, or
            `min_bytes` is not a number of bytes.
        SavedTensorError: in backward, if the program wrote to a tensor that forward had saved.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> offload_activations(model, policy={nn.Linear}) is model
        True

    After Rhu et al., "vDNN" (2016), and `torch.autograd.graph.save_on_cpu`.
    """

    def bracket_of(each: nn.Module) -> OffloadBracket:
        return OffloadBracket(
            int(min_bytes), bool(pin_memory), describe_module(each, known_fqn(each))
        )

    options = {"min_bytes": min_bytes, "pin_memory": pin_memory}
    so = "there is no forward that saves anything"
    _annotate_each(offload_activations, module, policy, options, bracket_of, so)
    return module


def _annotate_each(
    verb: Verb[..., Any],
    module: nn.Module | Sequence[nn.Module],
    policy: PolicyLike | None,
    options: Mapping[str, Any],
    make: Callable[[nn.Module], Bracket],
    so: str,
) -> None:
    """Attach the bracket that `make` returns to `module`, or to each module that the policy picks.

    The policy may override `options`, the other arguments of the verb. `so` says what follows from
    a module having no forward.
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
