"""Send weights to ranks that hold other shards of them, without a whole tensor anywhere: two ranks
train, two others generate with tensor parallelism.

torchrun --standalone --nproc-per-node=4 examples/rollouts.py
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import fully_shard


def part_of(shape, mesh, placements, rank):
    """What `rank` holds of a tensor: a start and an end along each dimension."""
    part = [(0, size) for size in shape]
    place = (mesh == rank).nonzero()[0].tolist()
    cuts = list(zip(place, mesh.shape, placements, strict=True))
    # fully_shard over tensor parallel gives _StridedShard, which cuts what the others leave
    for index, ranks, placement in sorted(cuts, key=lambda cut: type(cut[2]) is not Shard):
        if placement.is_replicate():
            continue
        start, end = part[placement.dim]
        size = math.ceil((end - start) / ranks)  # as torch.chunk cuts
        first = min(start + index * size, end)
        part[placement.dim] = (first, min(first + size, end))
    return part


def parts_in(parameter, group):
    """What each rank has of a parameter. A plain tensor is whole on all ranks of `group`."""
    if not isinstance(parameter, DTensor):
        return {rank: [(0, size) for size in parameter.shape] for rank in group}
    mesh = parameter.device_mesh.mesh
    return {
        rank: part_of(parameter.shape, mesh, parameter.placements, rank)
        for rank in mesh.flatten().tolist()
    }


def messages(held, wanted):
    """Who sends whom what, as (from, to, part): the same list on all ranks."""
    found = []
    for to, want in wanted.items():
        holders: dict = {}  # by part: replicas hold the same part, and one of them sends it
        for rank, part in held.items():
            holders.setdefault(tuple(part), []).append(rank)
        for part, ranks in holders.items():
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, want, strict=True)]
            if all(start < end for start, end in both):
                sender = to if to in ranks else ranks[to % len(ranks)]  # they take turns
                found.append((sender, to, both))
    return found


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def cut(tensor, origin, part):
    """A view of `part` in this rank's tensor, which begins at `origin`."""
    return tensor[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(part, origin, strict=True))]


@torch.no_grad()
def transfer(source, target, trainers, receivers):
    """Copy all parameters. A rank that has only one of the two models passes None for the other."""
    rank = dist.get_rank()
    # each side sends its layout to the other; keep `layouts` if they do not change
    layouts = []
    for model, group in ((source, trainers), (target, receivers)):
        layout = [model and {n: parts_in(p, group) for n, p in model.named_parameters()}]
        dist.broadcast_object_list(layout, src=group[0])
        layouts.append(layout[0])
    held, wanted = layouts
    mine = dict(source.named_parameters()) if source else {}
    theirs = dict(target.named_parameters()) if target else {}
    dtypes = [{name: parameter.dtype for name, parameter in theirs.items()}]
    dist.broadcast_object_list(dtypes, src=receivers[0])
    for name in wanted:  # one parameter at a time, in the same order on all ranks
        sent, received = [], []
        for sender, to, part in messages(held[name], wanted[name]):
            if rank == sender:
                piece = cut(local(mine[name]), held[name][rank], part).to(dtypes[0][name])
                sent.append((to, piece.contiguous()))
            if rank == to:
                place = cut(local(theirs[name]), wanted[name][rank], part)
                received.append((sender, place, torch.empty_like(place).contiguous()))
        for (_, piece), (_, place, _) in zip(
            [each for each in sent if each[0] == rank],
            [each for each in received if each[0] == rank],
            strict=True,
        ):
            place.copy_(piece)
        work: list = [dist.isend(piece, to) for to, piece in sent if to != rank]
        arriving = [each for each in received if each[0] != rank]
        work += [dist.irecv(buffer, sender) for sender, _, buffer in arriving]
        for each in work:
            each.wait()
        for _, place, buffer in arriving:
            place.copy_(buffer)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 66), nn.Linear(66, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_model():
    return nn.Sequential(Block(), Block())


def main():
    dist.init_process_group("gloo")
    rank, trainers, receivers = dist.get_rank(), [0, 1], [2, 3]
    training, inference = DeviceMesh("cpu", trainers), DeviceMesh("cpu", receivers)
    batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    model: Any = None  # on trainers
    engine: Any = None  # on receivers
    torch.manual_seed(0)
    if rank in trainers:
        model = make_model()
        fully_shard(model, policy={Block}, mesh=training)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        engine = make_model()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in engine:
            parallelize_module(block, inference, plan)

    transfer(model, engine, trainers, receivers)

    with torch.no_grad():
        answer = (model or engine)(batch)
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    if rank == 0:
        same = all(torch.allclose(each, answer, atol=1e-6) for each in answers)
        print(f"the receivers compute what the trainers do: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
