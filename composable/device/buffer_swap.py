"""Buffers in the dtype that modules compute in, while they compute; knows registries of buffers, no unit and no order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composable.device.parameter_swap import ParameterSwap, ShardedParam


class BufferHolder(NamedTuple):
    """A module, and what its floating-point buffers are cast to: all of them, or those that are named."""

    module: nn.Module
    dtypes: torch.dtype | Mapping[str, torch.dtype]

    def dtype_of(self, name: str) -> torch.dtype | None:
        """None: the buffer is left as it is."""
        return self.dtypes.get(name) if isinstance(self.dtypes, Mapping) else self.dtypes


class SwapWithBuffers(ParameterSwap):
    """A swap that casts floating-point buffers, too, as long as modules see unsharded parameters.

    At rest modules hold the buffers themselves, in their own dtype: whoever saves, moves or replaces them need not know.
    """

    __slots__ = ("_holders", "_shown")

    def __init__(self, params: Sequence[ShardedParam], holders: Sequence[BufferHolder]) -> None:
        super().__init__(params)
        self._holders = holders
        self._shown: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # place, the buffer itself, its cast

    def use_unsharded(self) -> None:
        super().use_unsharded()
        casts: dict[tuple[int, torch.dtype], Tensor] = {}  # a buffer that modules share stays one
        with torch.no_grad(), torch.inference_mode(False):
            for holder in self._holders:
                module = holder.module
                for name, buffer in module._buffers.items():
                    dtype = holder.dtype_of(name)
                    if dtype is None or buffer is None or buffer.dtype == dtype or not buffer.is_floating_point():
                        continue
                    cast = casts.get((id(buffer), dtype))
                    if cast is None:
                        cast = casts[id(buffer), dtype] = buffer.to(dtype)
                    self._shown.append((module, name, buffer, cast))
                    module._buffers[name] = cast

    def use_sharded(self) -> None:
        with torch.no_grad():
            while self._shown:  # forgotten when it is done: an interrupt may come in between
                module, name, buffer, cast = self._shown[-1]
                held = module._buffers.get(name)
                if held is cast:
                    # What forward did not change keeps all its bits. No version counter tells: batch norm's do not count.
                    buffer.data.copy_(torch.where(buffer.to(cast.dtype) == cast, buffer, cast.to(buffer.dtype)))
                    module._buffers[name] = buffer
                elif held is not None and held.dtype == cast.dtype:  # forward put another tensor there
                    module._buffers[name] = held.to(buffer.dtype)
                self._shown.pop()
        super().use_sharded()


def swap_of(params: Sequence[ShardedParam], holders: Sequence[BufferHolder]) -> ParameterSwap:
    """Which form of a unit's parameters, and of the buffers of its modules, they see."""
    return SwapWithBuffers(params, holders) if holders else ParameterSwap(params)
