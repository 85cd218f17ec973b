"""The verb `checkpoint`."""

from __future__ import annotations

from typing import Final, Literal

from composable.api.brackets import annotate_each
from composable.checked import checked
from composable.contract.contract import Target, contract
from composable.errors import AnnotationError
from composable.features.activations import Contexts, RecomputeBracket, RecomputeOptions
from composable.policies import PolicyLike

_EQUIVALENTS: Final = {
    "use_reentrant": (
        "checkpointing is never reentrant here; leave it out, or use"
        " torch.utils.checkpoint.checkpoint"
    ),
    "checkpoint_fn": "context_fn=",
    "check_fn": "policy=",
}


@contract(equivalents=_EQUIVALENTS, only_submodules_with="policy")
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
    annotate_each(
        checkpoint, module, policy, options._asdict(), lambda _: RecomputeBracket(options), so
    )
    return module
