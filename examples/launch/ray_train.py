"""Two workers of Ray Train; needs `pip install "ray[train]"`.

python examples/launch/ray_train.py
"""

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from composable import fully_shard


def train(config):
    """Runs on each worker. Ray has made the process group: gloo without GPUs, NCCL with them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    start = 0
    # of this run, where Ray has started its workers again; or of another one
    if last := ray.train.get_checkpoint() or config["checkpoint"]:
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": start}
        with last.as_directory() as folder:
            dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        start = saved["step"]

    for step in range(start, config["steps"]):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)

        # each worker writes its shards into a folder of its own, which Ray collects into one
        with tempfile.TemporaryDirectory() as folder:
            weights, state = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": state, "step": step + 1}
            dcp.save(saved, checkpoint_id=folder)
            metrics = {"step": step, "loss": mean.item()}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def fit(workers, storage, steps, checkpoint=None):
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": steps, "checkpoint": checkpoint},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(storage), name=f"{workers}-workers"),
    )
    return trainer.fit()


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        first = fit(2, Path(storage), steps=3)
        then = fit(1, Path(storage), steps=4, checkpoint=first.checkpoint)
    for result in (first, then):
        print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.4f}", flush=True)
    ray.shutdown()
