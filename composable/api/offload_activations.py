"""The verb `offload_activations`: validate and attach. Copies nothing itself."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from torch import nn

from composable.api.selection import check_keywords
from composable.errors import AnnotationError, describe_module
from composable.model.contract import contract, known_fqn, on_undo, require_callable
from composable.model.hooks import attach, detach
from composable.policies import PolicyLike, select_modules
from composable.runtime.offload import OffloadBracket, OffloadOptions

NAME: Final = "offload_activations"
OPTIONS: Final = ("min_bytes", "pin_memory")
# A link takes some 40 us each way for as much; to go and come back costs the host more than 0.1 ms, whatever the size.
MIN_BYTES: Final = 1 << 20
_EQUIVALENTS: Final = {
    "min_offload_size": "min_bytes=",
    "max_fwd_stash_size": "the last few tensors stay on the device until their copies are made; leave it out",
    "use_pin_memory": "pin_memory=",
    "use_streams": "copies always have streams of their own; leave it out",
}


class OffloadState:
    """What `offload_activations` leaves in the registry."""

    def __init__(self) -> None:
        self.brackets: list[OffloadBracket] = []


@contract(state_cls=OffloadState, equivalents=_EQUIVALENTS, only_submodules_with="policy")
def offload_activations(
    module: nn.Module | list[nn.Module],
    *,
    policy: PolicyLike | None = None,
    min_bytes: int = MIN_BYTES,
    pin_memory: bool = True,
) -> Any:
    """Keep what `module` saves for backward in the host's memory meanwhile, in place.

    Each tensor travels to the host while forward goes on, and returns ahead of its use in backward, in the order in which
    backward asks. Shapes, dtypes, strides and values are the same, bit for bit; storages that several tensors share travel
    once. Parameters, their views and buffers stay, and so does whatever is no plain strided tensor. Forwards without
    gradients copy nothing. On a CPU there is nowhere to go: nothing is copied, and `describe` says so. With a
    policy only the modules that it picks are annotated, not `module`.

    With `checkpoint` on the same module, in either order of the calls, or inside of it, activations are recomputed, and the
    inputs of what is recomputed are on the host. Inside a checkpointed module, activations are on the host, and what is around
    them is recomputed.

    Args:
        module: a module, or a list of modules, each offloaded by itself.
        policy: which submodules to offload; see `composable.policies`.
        min_bytes: tensors that take less, in bytes, stay on the device.
        pin_memory: use pinned memory of the host. Without it every copy to the host makes the host wait.

    Returns:
        What it was given.

    Raises:
        AnnotationError: the module is offloaded already or has no forward, a keyword is unknown, or `min_bytes` is no number of
            bytes.
        SavedTensorError: by backward, when something was written to that forward had saved.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> offload_activations(model, policy={nn.Linear}) is model
        True

    After Rhu et al., "vDNN" (2016), and `torch.autograd.graph.save_on_cpu`.
    """
    asked: tuple[Any, Any] = (min_bytes, pin_memory)  # whatever users write
    if type(asked[0]) is not int or min_bytes < 0:
        raise AnnotationError(f"{NAME}: min_bytes must be a number of bytes, 0 or more, got {min_bytes!r}")
    if type(asked[1]) is not bool:
        raise AnnotationError(f"{NAME}: pin_memory must be True or False, got {pin_memory!r}")
    options = OffloadOptions(min_bytes, pin_memory)
    modules = module if isinstance(module, list) else [module]
    if policy is None:
        for each in modules:
            require_callable(each, so="there is no forward that saves anything")
            bracket = OffloadBracket(options, describe_module(each, known_fqn(each)))
            state = offload_activations.state(each)
            assert state is not None
            state.brackets.append(bracket)
            on_undo(partial(detach, each, NAME))
            attach(each, NAME, bracket)
        return module
    for root in modules:
        picked = select_modules(policy, root)
        check_keywords(NAME, picked, OPTIONS)
        call = {name: getattr(options, name) for name in OPTIONS}
        for chosen, overrides in picked.items():
            offload_activations(chosen, **{**call, **overrides})
    return module
