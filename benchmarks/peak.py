"""Claim: sharded training needs no more memory than FSDP2's, at any number of ranks.

Predicted without an accelerator.

Six blocks of Llama 7B in bfloat16 on a device whose tensors have no numbers. The unit is one
block's unsharded parameters (386 MiB) with their padding. Counted is what lies above the shards at
the peak of forward and of backward; in backward sharded gradients come up, as many as the last
column says. Activations are those of one token.

    # 8, 64, 128 and 512 ranks
    python benchmarks/peak.py
    python benchmarks/peak.py --ranks 1024
    python benchmarks/peak.py --contenders composable-hybrid,fsdp2-hybrid
    # all that was counted, also operations and payloads, for tests
    python benchmarks/peak.py --json
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from fake_device import NAME, install, leave, world_of
from publish import table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

WIDTH, HIDDEN, BLOCKS = 4096, 11008, 6


class Block(nn.Module):
    """The parameters of a block of Llama 7B. What it computes has the shapes of one token, and no
    sense.
    """

    def __init__(self) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": NAME, "dtype": torch.bfloat16}
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False, **made) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False, **made) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, **made)
        self.first, self.second = (nn.RMSNorm(WIDTH, **made) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.o(self.q(y) + self.k(y) * self.v(y))
        y = self.second(x)
        result: Tensor = x + self.down(self.gate(y) * self.up(y))
        return result


def ours(model: nn.Module, mesh: Any, keep: bool) -> None:
    from composable import fully_shard

    fully_shard(
        model,
        mesh=mesh,
        policy={Block},
        reshard_after_forward=False if keep else None,
        sync_module_states="off",
    )


def fsdp2(model: nn.Module, mesh: Any, keep: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.children():
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=False if keep else None)


def replicated(model: nn.Module, mesh: Any, keep: bool) -> None:
    from composable import replicate

    replicate(model, mesh=mesh, sync_module_states="off")


CONTENDERS = {
    "composable": ours,
    "fsdp2": fsdp2,
    "composable-hybrid": ours,
    "fsdp2-hybrid": fsdp2,
    "replicate": replicated,
}
DEFAULT = "composable,fsdp2"


def spread(mesh: Any, name: str) -> Any:
    """The mesh, or one with two replicas."""
    if not name.endswith("hybrid"):
        return mesh
    with unset_fake_temporarily():
        return init_device_mesh(NAME, (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(name: str, ranks: int, keep: bool) -> dict[str, Any]:
    with world_of(ranks) as (mesh, watch):
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        unit = sum(
            2 * -(-p.shape[0] // ranks) * ranks * p.shape[1:].numel() for p in model[0].parameters()
        )
        gc.collect()
        whole = watch.held
        watch.start()
        CONTENDERS[name](model, spread(mesh, name), keep)
        annotating = watch.peak - whole
        x = torch.ones(1, WIDTH, device=NAME, dtype=torch.bfloat16)
        sharded = sum(local(parameter).numel() * 2 for parameter in model.parameters())
        for _ in range(3 if name == "replicate" else 1):  # buffers are made, and orders known
            model(x).sum().backward()
        gc.collect()
        at_rest = watch.held - sharded  # without gradients
        for parameter in model.parameters():
            parameter.grad = None
        reads = watch.reads
        watch.start()
        loss = model(x).sum()
        forward, in_forward = watch.peak - at_rest, dict(watch.operations)
        watch.start()
        loss.backward()
        backward, in_backward = watch.peak - at_rest, dict(watch.operations)
        shards = sharded + x.untyped_storage().nbytes() + loss.untyped_storage().nbytes()
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        resting = watch.held - shards
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        reads = watch.reads - reads
    return {
        "contender": name,
        "ranks": ranks,
        "keep": keep,
        "annotating": round(annotating / unit, 2),
        "resting": round(resting / unit, 2),
        "forward": round(forward / unit, 2),
        "backward": round(backward / unit, 2),
        "gradients": round(sharded / unit, 2),
        "operations": {"forward": in_forward, "backward": in_backward},
        "payloads": sorted(dict.fromkeys(watch.payloads)),
        "groups": groups,
        "reads": reads,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ranks", default="8,64,128,512")
    options.add_argument("--contenders", default=DEFAULT)
    options.add_argument("--json", action="store_true")
    found = options.parse_args()
    install()
    rows: list[list[str]] = []
    for ranks in map(int, found.ranks.split(",")):
        for keep in (False, True):
            cells = [measure(name, ranks, keep) for name in found.contenders.split(",")]
            if found.json:
                for cell in cells:
                    print(json.dumps(cell), flush=True)
            after = "keep" if keep else "as it comes"
            peaks = [f"{cell[phase]:.2f}" for phase in ("forward", "backward") for cell in cells]
            rows.append([str(ranks), after, *peaks, f"{cells[0]['gradients']:.2f}"])
    if not found.json:
        names = [
            f"{phase}, {name}"
            for phase in ("forward", "backward")
            for name in found.contenders.split(",")
        ]
        print(table(["ranks", "after forward", *names, "sharded gradients"], rows))


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:  # --help, or arguments that do not exist
        leave(int(end.code or 0))
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)
    leave()
