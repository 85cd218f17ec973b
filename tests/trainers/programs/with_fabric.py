"""Lightning Fabric's `ModelParallelStrategy`, whose user shards the model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.trainers.programs.recording import Record, digest


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.children():
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def run(record: Record, folder: str, *, shards: bool) -> None:
    """Set up from the meta device, accumulate, clip; save shards or one file, load it, go on."""
    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            _parallelize,
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=shards,
        ),
    )
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1))
    torch.manual_seed(0)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    record.note("initial", digest(model))

    def train() -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for number in range(4):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = model(torch.randn(4, 8, generator=generator)).square().mean()
                fabric.backward(loss / 2)
            record.note("loss", fabric.all_reduce(loss.detach()))
            if number % 2:
                record.note("norm", fabric.clip_gradients(model, optimizer, max_norm=0.5))
                optimizer.step()
                optimizer.zero_grad()

    train()
    fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": 2})
    train()
    record.note("trained on", digest(model))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(f"{folder}/saved", state)
    record.note("step", state["step"])
    train()
    record.note("resumed", digest(model))
