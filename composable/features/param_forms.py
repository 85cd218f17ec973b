"""Forms of parameters that are not plain tensors: `DTensorForm`, `PartForm` and `PackedForm`.

Tensor-parallel parameters are the user's `DTensor`s over other dimensions of the mesh, or plain
tensors that `declare_part` has declared as one rank's part of a whole.

The local tensor of such a parameter has the same shape on all data-parallel ranks, so a unit
shards, gathers and reduces it like a plain parameter. Around the local tensor there are these
`DTensor`s:

| | mesh | placements |
|---|---|---|
| at rest | (tp, dp) | the user's, then those of the unit |
| compute | tp | the user's |
| gradient as autograd leaves it | tp | any; redistributed to the user's |
| gradient accumulated under `no_sync` | (tp, dp) | the user's, then `Partial` |

The user's mesh may also contain the data-parallel dimensions (`dp_mesh_dims`). Before the
annotation, parameters are `Replicate` along them. Modules compute with the user's `DTensor`s, whose
gradients are `Partial` along these dimensions. The at-rest form is the same as above.

A DTensor applies its placements from left to right. With tp first, shards of local tensors are
therefore plain `Shard`s, even if both meshes cut the same dimension. Declared parts and their
gradients are plain tensors while modules compute. In all other respects they are handled like
`DTensor`s.

Packed parameters are bytes whose meaning is in Python attributes: 4-bit weights of bitsandbytes.
Such a parameter, a `Params4bit`, is a tensor of packed bytes of shape `[number, 1]`. Its attribute
`quant_state` has the scales, the code, and the shape of what the bytes stand for. It is frozen.

| | |
|---|---|
| at rest | a `DTensor(Shard(0))` of the bytes, with the attributes |
| gathered | as parameters of integers are: in their own dtype, whatever the precision policy says |
| compute | a parameter of the user's class around the gathered bytes, with the same attributes |

The scales are small, and whole on every rank. One `quant_state` is shared by the module and both
forms of the parameter. A class is known by its attributes, so that the package is not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import override

from composable.comm.backends import comm_of
from composable.comm.base import Comm
from composable.engine.params.param import PLAIN, ParamForm
from composable.tensors import is_packed, whole_of, wrap
from composable.torch_private import (
    local_of,
    local_tensor,
    locals_of,
    parameter_around,
    set_local,
    waited_for,
)

# --- tensor-parallel parameters ------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class DTensorForm(ParamForm):
    """How the user distributed one parameter.

    Attributes:
        like: a DTensor on the meta device with its mesh, placements, shape and stride.
        joint: the mesh that it rests on: the dimensions of its own one, and then those of the
            unit's.
        dims: which dimensions of its own mesh are not data parallel.
    """

    like: DTensor
    joint: DeviceMesh
    dims: tuple[int, ...]
    is_whole: ClassVar[bool] = False

    @property
    def mesh(self) -> DeviceMesh:
        return self.like.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self.like.placements)

    @override
    def owns(self, tensor: Tensor) -> bool:
        # It may be at rest, too, if not cut.
        return isinstance(tensor, DTensor) and (
            (tensor.device_mesh, tuple(tensor.placements)) == (self.mesh, self.placements)
        )

    @property
    @override
    def kept(self) -> tuple[Placement, ...]:
        return tuple(self.placements[dim] for dim in self.dims)

    @override
    def local_like(self, registered: Tensor) -> Tensor:
        return local_of(self.like)

    @override
    def mesh_at_rest(self, mesh: DeviceMesh | None) -> DeviceMesh | None:
        return self.joint

    @override
    def size_of(
        self, shape: torch.Size, strides: tuple[int, ...]
    ) -> tuple[torch.Size, tuple[int, ...]]:
        return self.like.shape, self.like.stride()

    @override
    def comms(self, device: torch.device) -> list[Comm]:
        return [comm_of(self.mesh.get_group(dim), device) for dim in self.dims]

    @override
    def refusal(self, name: str, replacement: nn.Parameter) -> str:
        if isinstance(replacement, DTensor):
            return ""
        return (
            f"parameter {name} is tensor parallel, and was replaced by a plain one; nothing would"
            " tell which part of it each rank has. Load it with load_state_dict(), or call"
            " remove(), and annotate again"
        )

    @override
    def compute_parameter(self, local: Tensor, *, requires_grad: bool) -> nn.Parameter:
        # A DTensor takes over the storage offset of what it is made around. torch.compile expects
        # that of the local tensor; at-rest parameters have none, so that they can be copied.
        like = self.like
        made = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False,
            shape=like.shape, stride=like.stride(),
        )  # fmt: skip
        parameter = parameter_around(made, requires_grad=requires_grad)
        set_local(parameter, local)  # type: ignore[arg-type]
        return parameter

    @override
    def shown(self, local: Tensor) -> Tensor:
        like = self.like
        return wrap(local, self.mesh, self.placements, like.shape, like.stride())

    @override
    @torch.no_grad()
    def unsharded(self, tensor: Tensor) -> Tensor:
        if self.owns(tensor) or not isinstance(tensor, DTensor):  # replicated parameters rest so
            return whole_of(local_tensor(tensor))
        # as if it were the same on all tensor-parallel ranks: along them nothing is sent
        like, placements = local_of(self.like), [*tensor.placements]
        placements[: self.ndim] = [Replicate()] * self.ndim
        local = local_of(tensor)
        return whole_of(wrap(local, tensor.device_mesh, placements, like.shape, like.stride()))

    @override
    def laid_out(self, value: Tensor, at_rest: nn.Parameter) -> Tensor:
        return value

    @override
    def refill(self, original: nn.Parameter, value: Tensor, at_rest: nn.Parameter) -> bool:
        if (original.dtype, original.device) != (value.dtype, value.device):
            return False
        local_tensor(original.detach()).copy_(value)
        return True

    # --- gradients -------------------------------------------------------------------------------

    @override
    def local_gradient(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        # Under sequence parallel, the gradient of what is replicated over tp is `Partial` there: an
        # all-reduce over tp, which all of its ranks launch, since they compute alike. It is made in
        # the dtype in which the gradient stays.
        if not isinstance(gradient, DTensor):
            return gradient
        if tuple(gradient.placements) != self.placements:
            taken = self.placements_taken(gradient)
            gradient = gradient.to(dtype).redistribute(placements=taken)  # type: ignore[attr-defined]
        return waited_for(local_of(gradient))  # type: ignore[arg-type]

    def placements_taken(self, gradient: DTensor) -> tuple[Placement, ...]:
        """The placements in which a gradient is reduced over the data-parallel dimensions: along
        them each rank has a term of the mean.
        """
        return tuple(
            own if dim in self.dims or came.is_shard() else came
            for dim, (own, came) in enumerate(
                zip(self.placements, gradient.placements, strict=True)
            )
        )

    @override
    def settled(self, gradient: Tensor) -> Tensor:
        if not isinstance(gradient, DTensor) or tuple(gradient.placements) == self.placements:
            return gradient
        taken = self.placements_taken(gradient)
        if gradient.placements != taken:
            gradient = gradient.redistribute(placements=taken)
            set_local(gradient, waited_for(local_of(gradient)))
        if taken == self.placements:
            return gradient
        return DTensor.from_local(
            gradient.to_local(), self.mesh, self.placements, run_check=False,
            shape=gradient.shape, stride=gradient.stride(),
        )  # fmt: skip


class PartForm(DTensorForm):
    """How the user distributed a parameter of which modules have a part, a plain tensor
    (`declare_part`).
    """

    __slots__ = ()

    owns = ParamForm.owns
    compute_parameter = ParamForm.compute_parameter
    shown = ParamForm.shown
    refusal = ParamForm.refusal


PART: Final = "_composable_part"  # the attribute that `declare_part` sets


def mesh_and_placements(parameter: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """How the user distributed `parameter`; None for a plain one."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    return getattr(parameter, PART, None)


def meta_like(parameter: Tensor, shape: torch.Size) -> DTensor:
    """A DTensor on the meta device that is distributed as `parameter`, and whole has `shape`."""
    found = mesh_and_placements(parameter)
    assert found is not None
    mesh, placements = found
    (local,) = locals_of([parameter])
    bare = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    stride = parameter.stride()
    if not isinstance(parameter, DTensor):
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(bare, mesh, placements, run_check=False, shape=shape, stride=stride)


# --- packed parameters ---------------------------------------------------------------------------

# Whether a linear of bitsandbytes packs its weight anew for evaluation on a CPU with AVX512-BF16.
_REPACKS: Final = "support_avx512bf16_for_cpu"

# The attribute of an 8-bit weight of bitsandbytes, which is replicated.
_OF_8_BITS: Final = "SCB"


def refusal_of(name: str, parameter: Any) -> str:
    """Why a packed parameter cannot be cut, and what to do; empty if it can."""
    kind = type(parameter).__name__
    if parameter.quant_state is None:
        return (
            f"parameter '{name}' of class {kind} is not quantised yet. Move the model to its device"
            " first, which quantises it, or leave it out with ignored_params"
        )
    if getattr(parameter.quant_state, "packing_format_for_cpu", False):
        return (
            f"parameter '{name}' of class {kind} is packed for evaluation on this CPU. Call"
            " state_dict() of its module, which packs it as before, or leave it out with"
            " ignored_params"
        )
    return ""


class PackedForm(ParamForm):
    """See the top of this file; `kind` is the user's class."""

    __slots__ = ("kind",)

    def __init__(self, kind: type[nn.Parameter]) -> None:
        self.kind = kind

    @override
    def finish_copy(self, made: Any, memo: dict[Any, Any]) -> None:
        """Let a copy have scales of its own, which its module's copy shares."""
        made.quant_state = copy.deepcopy(made.quant_state, memo)


def form_of(parameter: nn.Parameter) -> ParamForm:
    """The form of a parameter that is not distributed over ranks."""
    own = is_packed(parameter) and not isinstance(parameter, DTensor)
    return PackedForm(type(parameter)) if own else PLAIN


def prepare_packed(module: nn.Module, device: torch.device) -> list[Callable[[], object]]:
    """Let a module compute on `device` with packed parameters that come and go, and a bias that
    does, and load what its state dict has of their scales; returns what undoes it.
    """
    packed: list[Any] = [each for each in module.parameters(recurse=False) if is_packed(each)]
    undo: list[Callable[[], object]] = []
    for parameter in packed:
        if (state := parameter.quant_state) is not None:
            state.to(device)
            # torch.distributed.checkpoint.state_dict looks keys of a state dict up by `getattr`
            for key, value in state.as_dict(packed=True).items():
                vars(parameter).setdefault(key.partition(".")[0], value)
    if packed:
        undo.append(module.register_load_state_dict_pre_hook(_load_scales).remove)
    if module._parameters.get("bias") is not None and (
        packed or any(hasattr(each, _OF_8_BITS) for each in module.parameters(recurse=False))
    ):
        cast = _CastBias()
        undo.append(module.register_forward_pre_hook(cast.before).remove)
        # before units exchange their parameters
        after = module.register_forward_hook(cast.after, prepend=True, always_call=True)
        undo.append(after.remove)
    if packed and getattr(module, _REPACKS, False):
        # It would exchange the memory of what is gathered, and change the shared `quant_state`.
        _set_repacks(module, repacks=False)
        undo.append(partial(_set_repacks, module, repacks=True))
    return undo


class _CastBias:
    """A linear of bitsandbytes casts its bias to the dtype that it computes in, in place
    (`bias.data = ...`): what is gathered would not reach it any more. So in a call it has a cast
    one, which it leaves alone.
    """

    def __init__(self) -> None:
        self._bias: Tensor | None = None  # in a call, the one that the module has outside

    def before(self, module: nn.Module, args: Any) -> None:
        bias = module._parameters["bias"]
        dtype = getattr(module, "compute_dtype", None) or (args[0].dtype if args else None)
        if bias is not None and dtype is not None and bias.dtype != dtype:
            self._bias = bias
            module._parameters["bias"] = bias.to(dtype)  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._bias is not None:
            module._parameters["bias"], self._bias = self._bias, None  # type: ignore[assignment]


def _set_repacks(module: nn.Module, *, repacks: bool) -> None:
    """For `undo`, by `partial`: copies of the module know functions of Python, and no built-in."""
    setattr(module, _REPACKS, repacks)


def _load_scales(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the entries of packed parameters' `quant_state`, which the module writes and does not
    read.
    """
    for name, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False):
        keys = [key for key in state_dict if key.startswith(f"{name}.")]
        if keys and is_packed(parameter):
            state: Any = parameter.quant_state  # type: ignore[attr-defined]
            entries = {key.removeprefix(f"{name}."): state_dict.pop(key) for key in keys}
            vars(state).update(vars(type(state).from_dict(entries, state.absmax.device)))
            # what `prepare_packed` has put there is of before
            there = {
                key.partition(".")[0]: each for key, each in state.as_dict(packed=True).items()
            }
            vars(parameter).update({**there, "quant_state": state})
