"""The floor of the host's time for sharded units: torch's own calls, and nothing around them.

Per unit and step: two all-gathers, the message split into whole parameters, parameters swapped in
and out of their modules four times, a gradient message, one reduce-scatter, and per parameter a
view of the result and a `DTensor` around it, from two forward hooks and one hook of the graph. No
streams, no prefetching, no checks, no accumulation, no other layout than padded rows: it cannot be
used to train; it shows what a design that keeps neither messages nor gradients must spend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp, ReduceScatterOptions
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


class PlainUnit:
    """The parameters of `modules`, gathered before use and reduced after it.

    Attributes:
        at_rest: a `DTensor` per parameter; one rank's rows.
        compute: the whole parameters, whose memory is taken once and never freed.
    """

    def __init__(self, modules: list[nn.Module], mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._world = mesh.size()
        self._places = [
            (module._parameters, name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        whole = [holder[name].detach() for holder, name in self._places]
        self._rows = [-(-p.shape[0] // self._world) for p in whole]
        self._sizes = [
            rows * (p.numel() // p.shape[0]) for rows, p in zip(self._rows, whole, strict=True)
        ]
        total, like = sum(self._sizes), whole[0]
        self._shard = like.new_zeros(total)
        self._message = like.new_empty(self._world, total)
        padded = [like.new_zeros(self._world * size) for size in self._sizes]
        self._padded = tuple(padded)
        self._landing = [flat.view(self._world, -1) for flat in padded]
        self.compute = [
            nn.Parameter(flat[: p.numel()].view(p.shape))
            for flat, p in zip(padded, whole, strict=True)
        ]
        offset = 0
        for p, size in zip(whole, self._sizes, strict=True):
            mine = p.flatten()[:size]  # what the faked group then says that every rank holds
            self._shard[offset : offset + len(mine)] = mine
            offset += size
        self._specs = [
            DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(p.shape, p.stride(), p.dtype))
            for p in whole
        ]
        self._stand_in = like.new_empty(0)
        self.at_rest = [nn.Parameter(p) for p in self._around(self._shard)]
        self._gather_options, self._reduce_options = AllgatherOptions(), ReduceScatterOptions()
        self._reduce_options.reduceOp = ReduceOp.SUM
        self.show(self.at_rest)

    def _around(self, flat: Tensor) -> list[DTensor]:
        found, offset = [], 0
        for spec, rows, size in zip(self._specs, self._rows, self._sizes, strict=True):
            shape = (rows, *spec.shape[1:])
            # `DTensor(...)` is the same behind two decorators: 12 us in place of 2
            made = DTensor.__new__(DTensor, self._stand_in, spec, requires_grad=False)
            made._local_tensor = flat.as_strided(shape, spec.stride, offset)
            found.append(made)
            offset += size
        return found

    def show(self, parameters: list[nn.Parameter]) -> None:
        for (holder, name), parameter in zip(self._places, parameters, strict=True):
            holder[name] = parameter

    def gather(self) -> None:
        self._group._allgather_base(self._message, self._shard, self._gather_options).wait()
        torch.split_with_sizes_copy(self._message, self._sizes, dim=1, out=self._landing)
        # the graph's saved parameters are the same values again
        torch._C._autograd._unsafe_set_version_counter(self._padded, (0,) * len(self._padded))

    def reduce(self) -> None:
        gradients = [parameter.grad for parameter in self.compute]
        for parameter in self.compute:
            parameter.grad = None
        flat = self._message.new_empty(self._message.numel())
        torch._chunk_cat(gradients, 0, self._world, out=flat.view(self._world, -1))
        reduced = self._shard.new_empty(self._shard.shape)
        self._group._reduce_scatter_base(reduced, flat, self._reduce_options).wait()
        for parameter, gradient in zip(self.at_rest, self._around(reduced), strict=True):
            parameter.grad = gradient


def plain_calls(model: nn.Module, units: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    blocks = [module for module in model.modules() if isinstance(module, units)]
    inside = {id(module) for block in blocks for module in block.modules()}
    root = PlainUnit([module for module in model.modules() if id(module) not in inside], mesh)
    waiting: list[PlainUnit] = []

    def before(unit: PlainUnit) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            unit.gather()
            unit.show(unit.compute)

        return hook

    def after(unit: PlainUnit) -> Any:
        def pre_backward(gradients: tuple[Tensor, ...]) -> None:
            # the unit whose backward is over: one in flight, as the libraries have it
            if waiting:
                waiting.pop().reduce()
            waiting.append(unit)
            unit.gather()

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            unit.show(unit.at_rest)
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(pre_backward)

        return hook

    def end() -> None:
        waiting.pop().reduce()
        root.reduce()

    def last(gradients: tuple[Tensor, ...]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def watch_root(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        root.show(root.at_rest)
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(last)

    for block in blocks:
        unit = PlainUnit(list(block.modules()), mesh)
        block.register_forward_pre_hook(before(unit))
        block.register_forward_hook(after(unit))
    # the root stays gathered until its backward, as with FSDP2
    model.register_forward_pre_hook(before(root))
    model.register_forward_hook(watch_root)
    return model
