"""Buffers in the dtype that modules compute in, while they compute; knows registries of buffers, no unit and no order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from composable.device.parameter_swap import ParameterSwap, ShardedParam


class SwapWithBuffers(ParameterSwap):
    """A swap that casts floating-point buffers, too, as long as modules see unsharded parameters.

    At rest modules hold the buffers themselves, in their own dtype: whoever saves, moves or replaces them need not know.
    """

    __slots__ = ("_dtype", "_holders", "_shown")

    def __init__(self, params: Sequence[ShardedParam], modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        super().__init__(params)
        self._holders = modules
        self._dtype = dtype
        self._shown: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # place, the buffer itself, its cast

    def show(self) -> None:
        super().show()
        casts: dict[int, Tensor] = {}  # a buffer that modules share stays one
        with torch.no_grad(), torch.inference_mode(False):
            for module in self._holders:
                for name, buffer in module._buffers.items():
                    if buffer is None or buffer.dtype == self._dtype or not buffer.is_floating_point():
                        continue
                    cast = casts.get(id(buffer))
                    if cast is None:
                        cast = casts[id(buffer)] = buffer.to(self._dtype)
                    self._shown.append((module, name, buffer, cast))
                    module._buffers[name] = cast

    def hide(self) -> None:
        with torch.no_grad():
            while self._shown:  # forgotten when it is done: an interrupt may come in between
                module, name, buffer, cast = self._shown[-1]
                held = module._buffers.get(name)
                if held is cast:
                    # What forward did not change keeps all its bits. No version counter tells: batch norm's do not count.
                    buffer.data.copy_(torch.where(buffer.to(cast.dtype) == cast, buffer, cast.to(buffer.dtype)))
                    module._buffers[name] = buffer
                elif held is not None and held.dtype == self._dtype:  # forward put another tensor there
                    module._buffers[name] = held.to(buffer.dtype)
                self._shown.pop()
        super().hide()


def swap_of(params: Sequence[ShardedParam], modules: Sequence[nn.Module], buffer_dtype: torch.dtype | None) -> ParameterSwap:
    """Which form of a unit's parameters, and of the buffers of its modules, they see."""
    return ParameterSwap(params) if buffer_dtype is None else SwapWithBuffers(params, modules, buffer_dtype)
