"""What `replicate` leaves in the registry: a unit, its reducer, and the bracket around its module's forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composable.device.collectives import Wire
from composable.device.parameters import Owner
from composable.device.private import in_backward
from composable.model.hooks import before_gradient, tensors_in
from composable.runtime.ground import Ground
from composable.runtime.reducer import Reducer


class ReplicatedUnit:
    """A replicated module. It is the state and the bracket in one object."""

    def __init__(self) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.name = ""
        self.names: tuple[str, ...] = ()
        self.ground: Ground | None = None
        self._owners: tuple[Owner, ...] = ()
        self._places: list[tuple[dict[str, nn.Parameter | None], str]] | None = None  # of the owners; asked at every forward
        self._buffers: tuple[Owner, ...] = ()
        self._cap_bytes = 0
        self._reducer: Reducer | None = None
        self._depth = 0

    def take_charge(
        self,
        modules: Sequence[nn.Module],
        owners: Sequence[Owner],
        names: Sequence[str],
        buffers: Sequence[Owner],
        ground: Ground,
        cap_bytes: int,
    ) -> None:
        self.modules = tuple(modules)
        self._owners = tuple(owners)
        self.names = tuple(names)
        self._buffers = tuple(buffers)
        self.ground = ground
        self._cap_bytes = cap_bytes

    @property
    def wire(self) -> Wire:
        assert self.ground is not None, "the unit is used before replicate has finished"
        return self.ground.wire

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters as the module holds them now."""
        if self._places is None:
            self._places = [(owner.module._parameters, owner.name) for owner in self._owners]
        held = [registry.get(name) for registry, name in self._places]
        return [parameter for parameter in held if parameter is not None]

    @property
    def reducer(self) -> Reducer:
        parameters = self.parameters
        if self._reducer is None or not self._reducer.fits(parameters):
            self._reducer = self._make_reducer(parameters, self._reducer)
        return self._reducer

    def _make_reducer(self, parameters: Sequence[nn.Parameter], last: Reducer | None) -> Reducer:
        agreement = None
        if last is not None:
            last.detach()
            # Ranks replace parameters one by one, but what they have agreed on stands until they agree again.
            agreement = last.agreement if len(last.parameters) == len(parameters) else None
        unit = self.name or "root"
        return Reducer(parameters, self.names, self.wire, cap_bytes=self._cap_bytes, unit=unit, agreement=agreement)

    # --- the bracket ------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth == 1 and not in_backward():
            reducer = self.reducer
            if reducer.in_backward:
                reducer.unwind()  # the backward before this forward raised
            self._share_buffers()
        return args, kwargs

    def leave(self, module: nn.Module, output: Any) -> Any:
        self._depth -= 1
        if torch.is_grad_enabled() and self._reducer is not None and self.wire.ways > 1:
            reducer = self._reducer
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    before_gradient(tensor, reducer.open)
        return output

    def abandon(self, module: nn.Module) -> None:
        self._depth -= 1

    def forget(self) -> None:
        self._depth = 0

    def _share_buffers(self) -> None:
        """Everybody computes with rank 0's buffers. Out of place: an earlier forward may have saved the old ones."""
        if not self._buffers or self.wire.ways == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Owner, Tensor]]] = {}
        for owner in self._buffers:
            buffer = owner.module._buffers.get(owner.name)
            if buffer is not None and buffer.numel():
                by_kind.setdefault((buffer.dtype, buffer.device), []).append((owner, buffer))
        for members in by_kind.values():
            with torch.no_grad(), torch.inference_mode(False):
                message = torch.cat([buffer.detach().reshape(-1) for _, buffer in members])
                self.wire.broadcast(message, label=f"broadcast of the buffers of unit '{self.name or 'root'}'")
                if self.wire.rank == 0:
                    continue
                pieces = message.split([buffer.numel() for _, buffer in members])
                for (owner, buffer), piece in zip(members, pieces, strict=True):
                    owner.module._buffers[owner.name] = piece.view(buffer.shape)

    def rename(self, name: str) -> None:
        self.name = name

    def dissolve(self) -> None:
        """Undo: the parameters stay as they are, nothing is reduced any more."""
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedUnit:
        twin = ReplicatedUnit()
        memo[id(self)] = twin
        for name in ("modules", "name", "names", "_owners", "_buffers", "ground", "_cap_bytes"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin
