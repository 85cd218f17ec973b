"""A whole training script: data, bf16, accumulation, clipping, a schedule, evaluation, checkpoints
that any number of ranks can resume from, export.

torchrun --standalone --nproc-per-node=2 examples/whole_script.py --out runs/whole
"""

import argparse
import itertools
import math
import os
import random
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    export,
    full_state_dict,
    fully_shard,
    no_sync,
)

SEED = 0
ROWS = 24  # per step, over all ranks and micro-batches: the same for any number of ranks
ACCUMULATE = 2  # micro-batches per step
LOG, SAVE = 2, 6  # log every 2 steps, save every 6
TOKENS = 64


# --- the model and its data: yours ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


def make_model(dropout):
    torch.manual_seed(SEED)  # the same weights on all ranks
    blocks = (Block(64, dropout) for _ in range(3))
    return nn.Sequential(nn.Embedding(TOKENS, 64), *blocks, nn.Linear(64, TOKENS))


def make_data(rows, seed):
    """Rows of tokens. Each token follows from the one before it."""
    tokens = [torch.randint(0, TOKENS, (rows,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(16):
        tokens.append((5 * tokens[-1] + 3) % TOKENS)
    return TensorDataset(torch.stack(tokens, dim=1))


def loss_of(model, words):
    logits = model(words[:, :-1]).float()
    return nn.functional.cross_entropy(logits.transpose(1, 2), words[:, 1:])


# --- parts of the loop ---------------------------------------------------------------------------


def start():
    """Join the process group, and return this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def say(*what):
    if dist.get_rank() == 0:
        print(*what, flush=True)


class Sampler(DistributedSampler):
    """This rank's share of a shuffled epoch, without the first `first` rows of all ranks."""

    first = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.first // self.num_replicas, None)


def steps_from(progress, loader):
    """Yield the micro-batches of each step, beginning at the row that `progress` has reached."""
    while True:
        loader.sampler.set_epoch(progress["epoch"])
        loader.sampler.first = progress["rows"]
        micro_batches = iter(loader)
        while len(step := [*itertools.islice(micro_batches, ACCUMULATE)]) == ACCUMULATE:
            progress["rows"] += ROWS
            yield step
        progress |= {"epoch": progress["epoch"] + 1, "rows": 0}


def schedule_of(optimizer, steps, warmup=4):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model, loader, device):
    """The mean loss over the rows of all ranks."""
    model.eval()
    total = torch.zeros(2, device=device)
    for (words,) in loader:  # all ranks have the same number: each forward gathers parameters
        words = words.to(device, non_blocking=True)
        total += torch.stack([loss_of(model, words) * len(words), total.new_tensor(len(words))])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# --- checkpoints ---------------------------------------------------------------------------------


def random_state():
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state):
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def state_of(model, optimizer, schedule, progress):
    """Return what a checkpoint stores. Each rank adds its shards, and its own random state."""
    weights, states = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": states,
        "schedule": schedule.state_dict(),
        "progress": progress,
        f"random {dist.get_rank()}": random_state(),
    }


def save(folder, state):
    """Write a checkpoint, under its final name once it is complete. The last two are kept."""
    step = state["progress"]["step"]
    partial = folder / f"partial-{step:06}"
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(folder / f"step-{step:06}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def resume(folder, model, optimizer, schedule, progress):
    """Load the last checkpoint, if there is one. The number of ranks may have changed since."""
    found = [max(folder.glob("step-*"), default=None)]
    dist.broadcast_object_list(found)  # all ranks load what rank 0 sees
    if found[0] is None:
        return
    ranks = progress["ranks"]
    dcp.load({"progress": progress}, checkpoint_id=found[0])
    say(f"goes on after step {progress['step']}, with {ranks} ranks")
    state = state_of(model, optimizer, schedule, progress)
    mine = f"random {dist.get_rank()}"
    same_ranks = progress["ranks"] == ranks
    if not same_ranks:
        del state[mine]
    dcp.load(state, checkpoint_id=found[0])
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    schedule.load_state_dict(state["schedule"])
    progress["ranks"] = ranks
    if same_ranks:
        set_random_state(state[mine])
    else:  # the saved states are for other ranks: seed with numbers that no rank has used yet
        torch.manual_seed(SEED + 1 + dist.get_rank() + 100_000 * progress["step"])


# --- the loop ------------------------------------------------------------------------------------


def main(options):
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model(options.dropout).to(device)
    checkpoint(model, policy={Block})  # recompute activations in backward
    policy = MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=torch.float32)
    fully_shard(model, policy={Block}, mp_policy=policy)  # shards stay in float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = schedule_of(optimizer, options.steps)

    data, held_out = make_data(200, seed=1), make_data(48, seed=2)
    rows, rest = divmod(ROWS, ranks * ACCUMULATE)
    if rest or not rows:
        raise SystemExit(f"{ROWS} rows cannot be divided over {ranks} ranks x {ACCUMULATE}")
    loader = DataLoader(
        data,
        batch_size=rows,
        sampler=Sampler(data, seed=SEED, drop_last=True),
        drop_last=True,
        pin_memory=device.type == "cuda",
        # a generator of its own: the loader's seeds would otherwise change dropout's numbers
        generator=torch.Generator().manual_seed(SEED),
    )
    share: DistributedSampler = DistributedSampler(held_out, shuffle=False, drop_last=True)
    evaluated = DataLoader(held_out, batch_size=12, sampler=share)

    torch.manual_seed(SEED + 1 + rank)  # different dropout on each rank
    progress = {"step": 0, "epoch": 0, "rows": 0, "ranks": ranks}
    options.out.mkdir(parents=True, exist_ok=True)
    resume(options.out, model, optimizer, schedule, progress)

    total = torch.zeros((), device=device)  # sum of losses, on the device: no wait per step
    steps = steps_from(progress, loader)
    for step in range(progress["step"], options.steps):
        for number, (words,) in enumerate(next(steps), start=1):
            words = words.to(device, non_blocking=True)
            with no_sync(model, enabled=number < ACCUMULATE):  # gradients are reduced once per step
                loss = loss_of(model, words) / ACCUMULATE
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress["step"] = step + 1

        if progress["step"] % LOG == 0:
            dist.all_reduce(total)  # each rank has summed the losses of its own rows
            mean = total.item() / LOG / ranks
            total.zero_()
            said = f"loss {mean:.4f}, norm {norm.item():.3f}, learning rate {rate:.5f}"
            say(f"step {progress['step']}: {said}")
        if progress["step"] % SAVE == 0 or progress["step"] == options.steps:
            say(f"held out: loss {evaluate(model, evaluated, device):.4f}")
            save(options.out, state_of(model, optimizer, schedule, progress))

    exported = options.out / "exported"
    if rank == 0:
        shutil.rmtree(exported, ignore_errors=True)  # left by an earlier run
    dist.barrier()
    export(model, exported)  # safetensors, in the format of model hubs
    whole = full_state_dict(model)  # on rank 0: whole tensors, to save as one file with torch
    if rank == 0:
        torch.save(whole, options.out / "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/whole"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    main(parser.parse_args())
