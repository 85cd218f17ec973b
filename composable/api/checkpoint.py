"""The verb `checkpoint`."""

from __future__ import annotations

from typing import Final, Literal

from composable.api.brackets import annotate_each
from composable.checked import checked
from composable.contract.contract import Target, contract
from composable.errors import AnnotationError
from composable.features.recompute import Contexts, RecomputeBracket, RecomputeOptions
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

    With a policy only the modules that it picks are annotated, not `module`. Together with
    `fully_shard` on the same module, in either order of the calls, parameters are unsharded twice
    per step: for forward, and for recomputation and backward together. Everything in the module
    runs twice, hooks of yours before forward included, and those after it where the second run
    comes to the end (`early_stop=False`); norms with a `running_mean`, as torch's batch norms,
    count each batch once. A second run that does something else is torch's `CheckpointError`, with
    a note that names the module.

    Args:
        module: a module, or a list of modules, each checkpointed by itself.
        policy: which submodules to checkpoint; see `composable.policies`.
        preserve_rng_state: recompute with the random numbers of the forward (dropout).
        context_fn: returns two context managers, for the forward and for the recomputation;
            selective checkpointing is `partial(create_selective_checkpoint_contexts, ops_to_save)`
            of torch.utils.checkpoint.
        determinism_check: "default" compares shapes, dtypes and devices of what is recomputed;
            "none" does not.
        debug: on a mismatch, show the traces of both runs.
        early_stop: stop recomputing when everything needed is there.

    Returns:
        `module`.

    Raises:
        AnnotationError: the module is checkpointed already or has no forward; a keyword is unknown.

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
