"""What users registered, moved or resized where a unit had registered its parameters; knows neither phases nor order."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.device.parameter_forms import describe_mesh
from composable.device.parameter_swap import ParameterSwap, ShardedParam
from composable.device.private import innermost, local_of
from composable.errors import ForeignParameterError
from composable.runtime.dtype_group import DtypeGroup
from composable.runtime.group_builder import GroupBuilder
from composable.runtime.optimizer_hooks import Form, note


class Registered(Protocol):
    """The parameters of a unit, as it left them with its modules."""

    def intact(self) -> bool:
        """Whether modules hold the parameters that the unit left there, and these hold its memory."""

    def adopt_replaced(self, unit: str) -> bool:
        """Take parameters that somebody registered, or moved, for the unit's own; True when groups have to be built anew."""


class RegisteredShards:
    """Sharded parameters, whose local tensors are the unit's memory.

    Attributes:
        sharded: the parameters.
        locals: where their data should be.
        numels: of these.
        swap: knows where they are registered.
    """

    __slots__ = ("_groups", "_params", "locals", "numels", "sharded", "swap")

    def __init__(self, params: Sequence[ShardedParam], groups: Sequence[DtypeGroup], swap: ParameterSwap) -> None:
        self._params = params
        self._groups = groups
        self.swap = swap
        self.sharded = tuple(param.sharded for param in params if isinstance(param.sharded, DTensor))
        self.locals = tuple(map(local_of, self.sharded))
        self.numels = list(map(Tensor.numel, self.locals))

    def intact(self) -> bool:
        if not self.swap.intact() or not all(map(is_, map(local_of, self.sharded), self.locals)):
            return False
        return list(map(Tensor.numel, self.locals)) == self.numels

    def adopt_replaced(self, unit: str) -> bool:
        self._refuse_resized(unit)
        self._refuse_moved_off_the_host(unit)
        # Whatever is refused is refused before the first parameter changes.
        newcomers = [_newcomer(unit, param) for param in self._params]
        for param, newcomer in zip(self._params, newcomers, strict=True):
            if newcomer is not None:
                note(param.sharded, Form.REPLACED, unit, param.info.fqn)
                param.replace(newcomer)
                param.sharded = newcomer
        return all(isinstance(param.registered, nn.Parameter) for param in self._params)

    def _refuse_resized(self, unit: str) -> None:
        """An operator with `out=` resizes this rank's shard to the whole, fails since the memory is not its own, and leaves a
        tensor that is larger than its memory: whoever writes to it next writes to what is behind it."""
        resized = ""
        for group in self._groups:
            for position, sharded in enumerate(group.sharded):
                assert isinstance(sharded, DTensor)
                local, view = local_of(sharded), group.flat.shard_view(position)
                if local.numel() != view.numel() and any(local is ours for ours in self.locals):
                    local.as_strided_(view.shape, view.stride())
                    resized = resized or group.flat.layout.slots[position].name
        if resized:
            raise ForeignParameterError(
                f"parameter '{resized}' of unit '{unit}': its shard was resized by an operator with out=, as "
                "torch.nn.init.eye_ calls one, which cannot work on shards. The shard has its shape again, and the values "
                "from before. Initialise the parameter before fully_shard, or load_state_dict() the whole tensor, which is "
                "sharded then"
            )

    def _refuse_moved_off_the_host(self, unit: str) -> None:
        """Shards of ranks that communicate on a host would come back to it, and be trained there without a word."""
        for param in self._params:
            tensor = param.registered
            if not isinstance(tensor, DTensor) or tensor.device_mesh.device_type != "cpu":
                continue
            device = local_of(tensor).device
            if device.type not in ("cpu", "meta"):
                raise ForeignParameterError(
                    f"parameter '{param.info.fqn}' of unit '{unit}' was moved to {device}, and the ranks of its mesh "
                    f"communicate on cpu. Call module.to('{device.type}') before fully_shard, or pass it a mesh of "
                    f"{device.type}, which moves parameters and buffers there; module.to('cpu') goes on as before"
                )


class RegisteredOwn:
    """Parameters of one rank without a mesh: they are the user's own, and what they are is looked up each time."""

    __slots__ = ("_builder", "_cast", "_params", "_seen")

    def __init__(self, params: Sequence[ShardedParam], groups: Sequence[DtypeGroup], builder: GroupBuilder) -> None:
        self._params = params
        self._builder = builder
        self._cast = bool(groups)  # any of them
        self._seen = self._look()

    def _look(self) -> list[tuple[object, ...]]:
        """What the casts depend on."""
        held = [param.registered for param in self._params] if self._cast else []
        return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in held if tensor is not None]

    def intact(self) -> bool:
        return self._cast and self._seen == self._look()

    def adopt_replaced(self, unit: str) -> bool:
        held = [param.registered for param in self._params]
        precision_of = self._builder.precision_of
        casts = self._cast or any(
            tensor is not None and precision_of(param, tensor.dtype).changes
            for param, tensor in zip(self._params, held, strict=True)
        )
        if casts and not all(isinstance(tensor, nn.Parameter) for tensor in held):
            return False  # functional_call, which brings its own tensors for one call
        for param, tensor in zip(self._params, held, strict=True):
            param.sharded = param.unsharded = tensor  # type: ignore[assignment]
        return casts


def _newcomer(unit: str, param: ShardedParam) -> nn.Parameter | None:
    """The parameter that somebody registered in place of ours, at any of its places; None if nobody did."""
    name = param.info.fqn
    held = [other for other in param.held if isinstance(other, Tensor) and other is not param.sharded]
    if any(not isinstance(other, nn.Parameter) and isinstance(innermost(other), DTensor) for other in held):
        raise ForeignParameterError(
            f"parameter '{name}' of unit '{unit}' was replaced by a DTensor that is no nn.Parameter, as "
            "torch.func.functional_call does with what torch.func.grad and the like hand to it; nothing would gather it. "
            "Gradients of sharded parameters come by backward(); transforms over inputs, torch.func.grad(...)(x), work"
        )
    others = {id(other): other for other in held if isinstance(other, nn.Parameter)}
    if not others:
        return None
    if len(others) > 1:
        raise ForeignParameterError(
            f"parameter '{name}' is tied: it has {len(param.info.places)} places, and different parameters were registered at "
            "them. Register one parameter at all of them; to untie them, call remove(module, fully_shard) first"
        )
    (other,) = others.values()
    if type(other) is not nn.Parameter and not isinstance(other, DTensor):
        raise ForeignParameterError(
            f"parameter '{name}' was replaced by a {type(other).__name__}; only an nn.Parameter can be sharded"
        )
    sharded = param.sharded
    if isinstance(other, DTensor) and isinstance(sharded, DTensor):
        ours, theirs = (sharded.device_mesh, sharded.placements), (other.device_mesh, other.placements)
        if ours != theirs:
            raise ForeignParameterError(
                f"parameter '{name}' was replaced by a DTensor that is spread otherwise: {other.placements} over "
                f"{describe_mesh(other.device_mesh)}, where the unit has {sharded.placements} over "
                f"{describe_mesh(sharded.device_mesh)}. Register its full_tensor() as a parameter, or load it with "
                "load_state_dict(), which spreads it anew"
            )
    return other
