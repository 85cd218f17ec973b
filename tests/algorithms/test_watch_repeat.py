"""`watch(model, repeat=True)`: operators of a unit that run again compute the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from composable import fully_shard, replicate, watch
from composable.errors import NotReproducedError
from composable.extras.watch.repeat import _Twice
from tests.algorithms.repeated import KINDS, Kind, Machine, flip, trained
from tests.algorithms.test_watch_agreement import train
from tests.algorithms.watched import PROGRAMS, SKIPPING
from tests.helpers.world import Pool, current_device, spmd

BLOCKS: Final = 3


def _all_reproduce(name: str) -> None:
    assert train(PROGRAMS.get(name, SKIPPING), None, action="raise", repeat=True) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*PROGRAMS, "skipped units"])
def test_sound_units_reproduce(pool: Pool, name: str, ranks: int) -> None:
    pool.run(ranks, _all_reproduce, name)


# --- ordinary programs ---------------------------------------------------------------------------


@contextmanager
def _watched(model: nn.Module, wrong: int = -1, *, plain: bool = False) -> Iterator[Any]:
    machine = Machine(wrong if dist.get_rank() == 1 else -1)
    with (
        nullcontext() if plain else machine.running(),
        watch(model, repeat=True, agree=0) as watched,
    ):
        yield machine, watched


def _is_left_alone(name: str) -> None:
    plain, _ = trained(KINDS[name], lambda _: nullcontext())
    seen, (machine, watched) = trained(KINDS[name], _watched)
    assert (watched.findings, watched.hints) == ([], [])
    assert seen == plain  # weights, buffers, generators, attributes, and what code did elsewhere
    assert len(machine.names) > BLOCKS
    assert not _get_current_dispatch_mode_stack()


def _is_found(name: str) -> None:
    """One wrong bit in one of the operators, on one rank."""
    _, (machine, _) = trained(KINDS[name], _watched)
    number = len(machine.names)
    # of steps of a closure the last one's is not kept any more
    for wrong in (0, number // 3, number // 2 if "closure" in name else number - 1):
        _, (spoiled, watched) = trained(KINDS[name], lambda model, at=wrong: _watched(model, at))
        said = [each for each in watched.findings if each.kind == "not reproduced"]
        if dist.get_rank() == 1:
            assert said, (wrong, spoiled.names[wrong])
            assert said[0].tensor.endswith(spoiled.names[wrong])
        assert said[0].ranks == (1,)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", KINDS)
def test_an_ordinary_program_is_left_alone(pool: Pool, name: str) -> None:
    pool.run(2, _is_left_alone, name)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", KINDS)
def test_one_wrong_bit_of_an_operator_is_found_in_it(pool: Pool, name: str) -> None:
    pool.run(2, _is_found, name)


# --- a kernel that computes wrongly --------------------------------------------------------------


class Kernels:
    """Kernels in place of torch's that compute wrongly where they are asked to.

    Attributes:
        wrong: the operator whose next call is wrong; with `always`, all of its calls are, each in
            another way.
    """

    def __init__(self, names: list[str]) -> None:
        self.wrong, self.always, self.calls = "", False, 0
        key = current_device().type.upper()
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once")  # kernels are replaced
            for name in names:
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                self._library.impl(name, self._of(name, kernel), key, with_keyset=True)

    def _of(self, name: str, kernel: Any) -> Any:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            output = kernel.call_boxed(keys, *args, **kwargs)
            if self.wrong == name and self.always:
                self.calls += 1
                return output * (1 + self.calls / 64)
            if self.wrong == name:
                self.wrong = ""
                flip(output)
            return output

        return run

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()


class Unreliable(nn.Module):
    """A block that says where it computes."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.runs: Any = lambda phase: None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.runs("forward")
        y: Tensor = self.dropout(self.inner(x).tanh())
        y.register_hook(lambda _: self.runs("backward"))
        return y


class Residual(nn.Module):
    """Residuals around units: others read the units' inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Unreliable() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def _trained(verb: str, wrong: tuple[str, str], block: int, on: str, always: bool = False) -> Any:
    torch.manual_seed(0)
    model = Residual().to(current_device())
    if verb == "shards":
        fully_shard(model, policy={Unreliable})
    else:
        for each in model.blocks:
            replicate(each)
        replicate(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    counts = []
    with Kernels(["addmm", "mm", "tanh_backward"]) as kernels:
        kernels.always = always

        def runs(phase: str) -> None:
            last = dist.get_rank() == dist.get_world_size() - 1
            if last and watched.step == block and phase == wrong[0]:
                kernels.wrong = wrong[1]

        model.blocks[block].runs = runs
        with watch(model, repeat=True, agree=0, action=on) as watched:
            for _ in range(BLOCKS):
                model(torch.randn(3, 4, device=current_device())).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                kernels.wrong = ""
                counts.append([int(each.count) for each in model.blocks])
    assert counts == [[step + 1] * BLOCKS for step in range(BLOCKS)]  # modules run once
    return [*watched.findings, *watched.hints]


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("verb", ["shards", "replicate"])
@pytest.mark.parametrize(
    "wrong", [("forward", "addmm"), ("backward", "tanh_backward"), ("backward", "mm")]
)
@spmd(ranks=2)
def test_a_rank_that_computes_wrongly_once_is_named(
    wrong: tuple[str, str], verb: str, block: int
) -> None:
    (found,) = _trained(verb, wrong, block, "warn")
    phase, operator = wrong
    named = found.kind, found.unit, found.tensor, found.ranks, found.step
    what = f"output 0 of aten.{operator} in {phase}"
    assert named == ("not reproduced", f"blocks.{block}", what, (1,), block)


@spmd(ranks=2)
def test_kernels_that_are_not_deterministic_are_a_hint() -> None:
    (found,) = _trained("shards", ("forward", "addmm"), 1, "raise", always=True)
    assert (found.kind, found.ranks) == ("hint", (1,))
    assert "its kernels are not deterministic (aten.addmm)" in str(found)


@spmd(ranks=2)
def test_on_raise_it_is_an_error_on_all_ranks() -> None:
    with pytest.raises(NotReproducedError, match="rank 1: an operator that ran again computed"):
        _trained("shards", ("forward", "addmm"), 0, "raise")


# --- what is left out ----------------------------------------------------------------------------


class _Other(TorchDispatchMode):
    """Answers an operator with what it has computed before, and something else the first time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output + 1 if func is torch.ops.aten.tanh.default else output


def test_what_is_written_in_place_runs_again_where_it_lies() -> None:
    """Kernels go by strides and alignment, and views by the memory around them."""
    torch.manual_seed(0)
    memory = torch.rand(7, 40, device=current_device())
    strided, shifted = memory[:, 1::3], memory.view(-1)[1:50].view(7, 7)
    numbers = torch.rand(7, 7, device=current_device())
    with _Twice() as twice:
        strided.atanh_().sinh_()
        strided[:, :7].pow_(numbers)
        shifted.addmm_(numbers, numbers)
        shifted.add_(1).unsqueeze_(0).squeeze_(0)
        shifted[2:4].as_strided_((2,), (1,), 0).mul_(2)
        nn.functional.rrelu(shifted, training=True, inplace=True)
    assert (twice.differs, twice.why) == ("", "")


def test_runs_that_agree_prove_nothing_of_sums_in_any_order() -> None:
    numbers = torch.zeros(4, device=current_device())
    indices = (torch.tensor([1, 1], device=current_device()),)
    with Kernels(["_index_put_impl_"]) as kernels:
        for asked in (False, True):
            kernels.wrong = "_index_put_impl_"
            torch.use_deterministic_algorithms(asked)
            try:
                with _Twice() as twice:
                    torch.index_put(numbers, indices, numbers[:2] + 1, accumulate=True)
            finally:
                torch.use_deterministic_algorithms(False)
            assert kernels.wrong == ""
            assert bool(twice.differs) is asked
            assert bool(twice.why) is not asked


@spmd(ranks=2)
def test_operators_under_a_mode_of_the_users_are_left_out() -> None:
    def scope(model: nn.Module) -> Any:
        stack.enter_context(_Other())
        return _watched(model)

    with ExitStack() as stack:
        _, (machine, watched) = trained(Kind(), scope)
    assert machine.names == []
    assert watched.findings == []


@spmd(ranks=2)
def test_of_steps_that_are_not_looked_at_no_unit_loses_its_turn() -> None:
    turns = []
    model = fully_shard(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(current_device()), policy={nn.Linear}
    )
    optimizer = SGD(model.parameters(), lr=0.1)
    with watch(model, every=2, repeat=True, agree=0) as watched:
        for _ in range(4):
            again = watched.observer.repeat
            turns.append(None if again is None else again.unit.name)
            model(torch.randn(3, 4, device=current_device())).sum().backward()
            optimizer.step()
    assert turns == ["0", None, "1", None]


@spmd(ranks=2)
def test_functions_that_are_compiled_stay_so() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    _, (_, watched) = trained(Kind(lambda block, x: function(block.one(x))), _watched)
    assert graphs
    assert watched.findings == []


@spmd(ranks=2)
def test_an_operator_that_raises_as_it_runs_again_is_said_once() -> None:
    def compare(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with mock.patch.object(_Twice, "_compare", compare):
        _, (_, watched) = trained(Kind(), lambda model: _watched(model, plain=True))
    assert watched.findings == []
    assert [(each.kind, each.unit) for each in watched.hints] == [("hint", "0"), ("hint", "1")]
    what = "is not repeatable: aten.addmm raised OutOfMemoryError as it ran again: no memory"
    assert what in str(watched.hints[0])
