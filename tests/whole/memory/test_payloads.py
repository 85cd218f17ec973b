"""What an accelerator's communicator sends to each rank: multiples of 16 bytes, from and to memory
that is aligned to that.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from composable import MixedPrecisionPolicy, fully_shard
from composable.comm.backends import comms_wrapped_by
from composable.comm.base import Comm, Work
from composable.comm.launch import Launch
from tests.helpers.communicators import Around, Pairs, all_accelerators
from tests.helpers.world import Pool

pytestmark = pytest.mark.beyond_sim("these tensors are of the host")


class _Weighing(Around):
    """Notes bytes per rank of what a group is given, and where reduced rows land."""

    def __init__(self, inner: Comm, payloads: list[int], **traits: int) -> None:
        super().__init__(all_accelerators(inner))
        self.traits = replace(self._inner.traits, **traits)
        self._payloads = payloads

    def all_gather(self, pairs: Pairs, launch: Launch) -> Work:
        self._payloads += [shard.numel() * shard.element_size() for _, shard in pairs]
        return super().all_gather(pairs, launch)

    def reduce_scatter(self, pairs: Pairs, launch: Launch, scale: float = 1.0) -> Work:
        self._payloads += [
            whole.numel() * whole.element_size() // self._inner.size for _, whole in pairs
        ]
        self._payloads += [out.data_ptr() for out, _ in pairs]
        return super().reduce_scatter(pairs, launch, scale)


class _AnyParameters(nn.Module):
    """Of odd, empty and large shapes and several dtypes, some of them frozen."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.all = nn.ParameterList()
        for _ in range(draw.randint(1, 6)):
            dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
            shape = [draw.choice([0, 1, 2, 3, 5, 7, 8, 33]) for _ in range(draw.randint(0, 3))]
            self.all.append(
                nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=draw.random() < 0.8)
            )

    def forward(self) -> Tensor:
        total: Tensor = sum(
            (p.abs().float().sum() for p in self.all), torch.zeros((), requires_grad=True)
        )
        return total


def _payloads_of_any_parameters(draw: random.Random, annotations: int) -> int:
    seen = 0
    for number in range(annotations):
        payloads: list[int] = []

        # otherwise all of them share messages
        traits = {"direct_bytes": 64} if draw.random() < 0.5 else {}
        model = _AnyParameters(draw)
        policy = draw.choice(
            [
                None,
                "bf16",
                MixedPrecisionPolicy(reduce_dtype="fp32"),
                MixedPrecisionPolicy("bf16", "fp64"),
            ]
        )
        dims = {id(p): draw.randrange(p.dim()) for p in model.all if p.dim()}
        with comms_wrapped_by(partial(_Weighing, payloads=payloads, **traits)):
            fully_shard(
                model,
                mp_policy=policy,
                shard_placement_fn=lambda p, dims=dims: Shard(dims[id(p)]) if p.dim() else None,
            )
        model().backward()
        assert [payload for payload in payloads if payload % 16] == [], (
            number,
            policy,
            [(p.shape, p.dtype) for p in model.all],
        )
        seen += len(payloads)
    return seen


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_whatever_shapes_dtypes_and_policies_there_are(
    pool: Pool, ranks: int, seed: int
) -> None:
    assert min(pool.run(ranks, _payloads_of_any_parameters, random.Random(seed), 25)) > 50
