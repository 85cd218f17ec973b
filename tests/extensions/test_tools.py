"""What the library does beside training, over parameters with FSDP2's extension protocol: as over
a model in one process with the same emulation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable import (
    EMA,
    Streamed,
    export,
    full_state_dict,
    fully_shard,
    join,
    materialize,
    remove,
    stream_full,
    summon_full_params,
)
from tests.extensions.rows import Emulated, Net, Rows, with_rows
from tests.extensions.test_protocol import _alone, _batch, _sharded, _train, _whole
from tests.helpers.world import spmd


def _same(found: dict[str, Any], alone: nn.Module) -> None:
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _averages() -> None:
    model, alone = _sharded(with_rows(Net(hidden=5))), Net(Emulated, 5)
    average, reference = EMA(model, decay=0.5), EMA(alone, decay=0.5)
    for _ in range(2):
        torch.testing.assert_close(_train(model, 1), _alone(alone, steps=1))
        average.update()
        reference.update()
    _same(_whole(model), alone)
    with average.swap(), reference.swap():
        _same(_whole(model), alone)
        torch.testing.assert_close(model(_batch(9)), alone(_batch(9)))
    fresh = EMA(model, decay=0.5)
    fresh.load_state_dict(reference.state_dict())
    with fresh.swap(), reference.swap():
        _same(_whole(model), alone)


def _materialize() -> None:
    with torch.device("meta"):
        model = with_rows(Net(hidden=5))
    _sharded(model)
    torch.manual_seed(3)
    materialize(model)
    alone = Net(Emulated, 5)
    torch.manual_seed(3)
    for module in alone.modules():
        getattr(module, "reset_parameters", lambda: None)()
    _same(_whole(model), alone)
    assert type(model.linears()[0].weight._local_tensor) is Rows  # type: ignore[union-attr]
    torch.testing.assert_close(_train(model, 1), _alone(alone, steps=1))


def _compile() -> None:
    model = _sharded(with_rows(Net(hidden=5)))
    for block in model.blocks:
        # from 2.14 on Dynamo traces hooks of modules whose forward is torch's own
        block.compile(backend="aot_eager", fullgraph=torch.__version__ < (2, 14))
    torch.testing.assert_close(_train(model), _alone(Net(Emulated, 5)))


def _stream_and_export() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    reported = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(reported)
    model = _sharded(with_rows(Net(hidden=5)))
    seen = Streamed()
    streamed = dict(stream_full(model, since=seen))
    assert not any(isinstance(each, Rows) for each in streamed.values())
    _same(streamed, Net(hidden=5))
    assert not list(stream_full(model, since=seen))
    export(model, f"{reported[0]}/out")
    _same(safetensors.load_file(f"{reported[0]}/out/model.safetensors"), Net(hidden=5))


def _join() -> None:
    model, plain = _sharded(with_rows(Net(hidden=5))), _sharded(Net(Emulated, 5))
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.02)
        with join(each, optimizer):
            for number in range(2 + dist.get_rank()):
                each(_batch(number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(_whole(model), _whole(plain), rtol=1e-4, atol=1e-5)


def _remove() -> None:
    model, alone = _sharded(with_rows(Net(hidden=5))), Net(Emulated, 5)
    _train(model, 1)
    _alone(alone, steps=1)
    for module in (*model.blocks, model):
        remove(module, fully_shard)
    values: list[Tensor] = [linear.weight.data.values for linear in model.linears()]  # type: ignore[misc]
    expected = [linear.weight.data for linear in alone.linears()]
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_train(_sharded(model), 1), _alone(alone, steps=1))


def _unsharded() -> None:
    model, alone = _sharded(with_rows(Net(hidden=5))), Net(hidden=5)
    with summon_full_params(model), torch.no_grad():
        for shown in model.parameters():
            shown.mul_(2.0)
    for parameter in alone.parameters():
        parameter.data.mul_(2.0)
    _same(full_state_dict(model, rank0_only=False), alone)


_TOOLS: Final[dict[str, Callable[[], None]]] = {
    "EMA": _averages,
    "materialize": _materialize,
    "compile": _compile,
    "stream_full and export": _stream_and_export,
    "join": _join,
    "remove": _remove,
    "summon_full_params": _unsharded,
}


@pytest.mark.unsampled
@pytest.mark.parametrize("tool", _TOOLS)
@spmd(ranks=2)
def test_it_does_what_it_does_in_one_process(tool: str) -> None:
    _TOOLS[tool]()
