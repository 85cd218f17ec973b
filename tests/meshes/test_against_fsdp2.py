"""Programs over several dimensions give the numbers of FSDP2 and of one process, in no more
messages than FSDP2 sends.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from composable import checkpoint, clip_grad_norm_, fully_shard, no_sync
from composable.comm.backends import comms_wrapped_by
from tests.helpers.communicators import Log, Recording
from tests.helpers.world import spmd
from tests.meshes.programs import PROGRAMS, Hybrid, Program
from tests.tensor_parallel.models import OPTIMIZERS, assert_same_parameters, full

pytestmark = pytest.mark.beyond_sim("FSDP2 does not know the device")

_BF16: Final = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_WAYS: Final = ("as it is", "mixed precision", "no_sync", "checkpoint", "compile", "clip")
_STEPS: Final = 5
# FSDP2 sums gradients over tensor-parallel ranks in the dtype of the compute, and composable in
# that of the reduction: apart by a rounding in bfloat16, which AdamW would make a whole step.
_ROUNDED: Final[dict[str, Any]] = {"rtol": 1e-2, "atol": 1e-3}


class _Messages(TorchDispatchMode):
    """Counts collectives of DTensors, and those of FSDP2. Ours are counted by their comms.

    Attributes:
        tensor: how many DTensors took.
        data: how many FSDP2 took.
    """

    _DATA = ("c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_")
    _TENSOR = tuple(f"_c10d_functional.{each}" for each in ("all_gather_", "all_reduce", "reduce_"))

    def __init__(self) -> None:
        super().__init__()
        self.tensor = self.data = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # counted are the operators that it is made of
        self.tensor += str(func).startswith(self._TENSOR)
        self.data += str(func).startswith(self._DATA)
        return func(*args, **(kwargs or {}))


@contextmanager
def _held(model: Any, verb: Any, on: bool) -> Iterator[None]:
    """Accumulate gradients."""
    if verb is fully_shard:
        with no_sync(model, enabled=on):
            yield
        return
    if verb is fsdp2:
        model.set_requires_gradient_sync(not on)
    yield


def _recompute(block: Any) -> None:
    forward = block.forward
    block.forward = lambda *args, **kwargs: torchs_checkpoint(
        forward, *args, use_reentrant=False, **kwargs
    )


def _train(program: Program, verb: Any, way: str) -> tuple[Any, list[Tensor], int, int]:
    """The model, its losses (and norms of gradients); and messages of the last step, over
    data-parallel dimensions and over the others.
    """
    model: Any = program.make()
    log = Log()
    options: dict[str, Any] = {}
    if way == "mixed precision":
        model.float()
        options["mp_policy"] = _BF16
    if way == "checkpoint" and verb is not None:
        for block in program.blocks(model):
            (checkpoint if verb is fully_shard else _recompute)(block)
    if verb is not None:
        with comms_wrapped_by(lambda comm: Recording(comm, log)):
            program.annotate(model, verb, **options)
    if way == "compile" and verb is not None:
        for block in program.blocks(model):
            block.compile(backend="aot_eager")
    kind = "SGD" if way == "mixed precision" else "AdamW"
    optimizer, losses = OPTIMIZERS[kind](model.parameters()), []
    for step in range(_STEPS):
        log.events.clear()
        sent = _Messages()
        for half in range(1 + (way == "no_sync")):
            with _held(model, verb, way == "no_sync" and not half), sent:
                loss = program.backward(model, 2 * step + half, alone=verb is None)
            loss = loss.float() if way == "mixed precision" else loss
            dist.all_reduce(loss)
            losses.append(loss / dist.get_world_size())
        if way == "clip":
            clip = torch.nn.utils.clip_grad_norm_ if verb is None else clip_grad_norm_
            losses.append(full(clip(model.parameters(), 0.01)).detach())
        optimizer.step()
        optimizer.zero_grad()
    data = sent.data if verb is fsdp2 else len(log.labels())
    return model, losses, data, sent.tensor


def _check(program: Program, way: str) -> None:
    model, losses, data, tensor = _train(program, fully_shard, way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # FSDP2 warns of an output that is a view
        other, expected, their_data, their_tensor = _train(program, fsdp2, way)
    rounded: dict[str, Any] = _ROUNDED if way == "mixed precision" else {}
    torch.testing.assert_close(losses, expected, **rounded)
    assert 0 < data <= their_data
    assert tensor == their_tensor
    alone, plain, *_ = _train(program, None, way)
    if way != "mixed precision":
        torch.testing.assert_close(losses, plain)
        assert_same_parameters(model, alone)
    else:
        alone.load_state_dict({name: full(p) for name, p in other.named_parameters()})
        assert_same_parameters(model, alone, **rounded)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
@spmd(ranks=4)
def test_numbers_are_those_of_fsdp2_and_of_one_process(program: str, way: str) -> None:
    _check(PROGRAMS[program](compiled=way == "compile"), way)


@pytest.mark.in_full_only
@pytest.mark.parametrize("way", _WAYS)
@spmd(ranks=8)
def test_replicas_of_shards_of_tensor_parallel_parameters_give_them_too(way: str) -> None:
    _check(Hybrid(compiled=way == "compile"), way)
