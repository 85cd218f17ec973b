"""torch's pipelines over stages that are sharded by FSDP2: two stages or four, over two ranks each.

Prints how far gradients are from those of one process.
"""

from __future__ import annotations

import copy
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def main(name: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    data_parallel, rank = mesh["dp"], mesh.get_local_rank("pp")
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block() for _ in range(4)))
    reference = copy.deepcopy(whole)
    data, target = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    for x, y in zip(data.flatten(0, 1).chunk(8), target.flatten(0, 1).chunk(8), strict=True):
        (mse_loss(reference(x), y) / 8).backward()
    kind = getattr(schedules, name)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    second = 3 - rank if kind is schedules.ScheduleZBVZeroBubble else rank + 2
    own, blocks = ([rank, second], 1) if several else ([rank], 2)
    parts = {at: nn.Sequential(*whole[at * blocks : (at + 1) * blocks]) for at in own}
    for part in parts.values():
        for block in part:
            fully_shard(block, mesh=data_parallel, reshard_after_forward=False)
        fully_shard(part, mesh=data_parallel, reshard_after_forward=False)
    stages = [
        PipelineStage(part, at, 4 // blocks, torch.device("cpu"), group=mesh.get_group("pp"))
        for at, part in parts.items()
    ]
    schedule = kind(stages if several else stages[0], n_microbatches=4, loss_fn=mse_loss)
    mine = data_parallel.get_local_rank()
    for _ in range(2):
        whole.zero_grad()
        inputs = (data[mine],) if 0 in own else ()
        last = {"target": target[mine], "losses": []} if 4 // blocks - 1 in own else {}
        schedule.step(*inputs, **last)
    far = 0.0
    for at, part in parts.items():
        for fqn, parameter in part.named_parameters():
            index, _, rest = fqn.partition(".")
            expected = reference[at * blocks + int(index)].get_parameter(rest).grad
            found = parameter.grad.full_tensor()  # type: ignore[union-attr]
            far = max(far, ((found - expected).abs().max() / expected.abs().max()).item())
    assert far < 1e-5, far
    if dist.get_rank() == 0:
        print(f"{name}: gradients of one process, as {type(parts[0]).__name__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
