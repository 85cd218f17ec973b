"""The verb `offload_activations`."""

from __future__ import annotations

from typing import Final

from torch import nn

from composable.api.brackets import annotate_each
from composable.checked import NonNegativeInt, checked
from composable.contract.contract import Target, contract, known_fqn
from composable.errors import describe_module
from composable.features.activations import OffloadBracket
from composable.policies import PolicyLike

# A link takes some 40 us each way for as much; a round trip costs the host more than 0.1 ms,
# whatever the size.
MIN_BYTES: Final = 1 << 20
_EQUIVALENTS: Final = {
    "min_offload_size": "min_bytes=",
    "max_fwd_stash_size": (
        "the last few tensors stay on the device until their copies are made; leave it out"
    ),
    "use_pin_memory": "pin_memory=",
    "use_streams": "copies always have streams of their own; leave it out",
}


@contract(equivalents=_EQUIVALENTS, only_submodules_with="policy")
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
    annotate_each(offload_activations, module, policy, options, bracket_of, so)
    return module
