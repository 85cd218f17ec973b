"""Offload of parameters on a CPU: nothing changes, which is said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from composable import CPUOffloadPolicy, describe, fully_shard, remove
from composable.errors import AnnotationError
from tests.helpers.compare import full
from tests.helpers.logged import logged
from tests.helpers.offloading import Line
from tests.helpers.world import Pool


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Line(), Line(), nn.Linear(8, 2))


def _trained(policy: Any) -> tuple[list[Tensor], list[str], str]:
    model = _model()
    with logged() as lines:
        fully_shard(model, policy={Line}, offload_policy=policy)
    described = str(describe(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(
            torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [full(p) if isinstance(p, DTensor) else p for p in model.parameters()]
    remove(model, fully_shard)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return values, lines, described


_NOTE = (
    "fully_shard: offload_policy has no effect where ranks compute on the CPU: parameters are in"
    " the host's memory anyway. To compute on an accelerator, pass a mesh of it"
)


def _nothing_changes() -> None:
    expected, silence, plain = _trained(None)
    assert silence == []
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), fsdp.CPUOffloadPolicy()):
        found, lines, described = _trained(policy)
        assert all(map(torch.equal, found, expected))
        assert [line.partition(": ")[2] for line in lines] == [_NOTE]
        assert (
            described
            == f"{plain}\noffload_policy: no effect where ranks compute on the CPU: (root), 0, 1"
        )
    assert _trained(fsdp.OffloadPolicy())[1] == [], "torch's way to say that nothing is offloaded"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_a_cpu_nothing_changes_and_that_is_said_once(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _nothing_changes, device="cpu")


def test_without_a_process_group_nothing_changes_and_that_is_said_once() -> None:
    _nothing_changes()


def test_units_have_policies_of_their_own() -> None:
    model = fully_shard(_model(), policy={"0": {"offload_policy": CPUOffloadPolicy()}, "1": {}})
    assert [row.offload for row in describe(model).rows] == ["", "no effect", ""]
    with pytest.raises(AnnotationError, match="a policy may override"):
        fully_shard(_model(), policy={"0": {"ignored_params": ()}})
