"""A model built on the meta device gets the weights of one process, whatever the plan."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import full_state_dict, fully_shard, materialize, refresh
from composable.errors import (
    ForeignParameterError,
    RanksDisagreeError,
)
from tests.helpers.world import Pool, current_device, need_devices, spmd
from tests.state.models import PLANS, Block, Net, initialise, plain, tokens


def _on_meta(plan: str) -> Net:
    with torch.device("meta"):
        model = Net()
    PLANS[plan](model)
    return model


def _assert_as_one_process(model: Net, expected: Net) -> None:
    found = full_state_dict(model, rank0_only=False)
    wanted = expected.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value.cpu()), name
    for block, other in zip(model.blocks, expected.blocks, strict=True):
        assert torch.equal(block.table, other.table), "a buffer that is in no state dict"
    assert model.head.weight is model.embed.weight


def _by_module(plan: str, init: Callable[[nn.Module], None] | None) -> None:
    model = _on_meta(plan)
    torch.manual_seed(3)
    materialize(model, init)
    after = torch.rand(1)
    expected = plain(3)
    assert torch.equal(after, torch.rand(1)), (
        "the random numbers that follow are those of one process, too"
    )
    _assert_as_one_process(model, expected)
    model(tokens(0)).sum().backward()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_are_those_of_one_process(pool: Pool, plan: str, ranks: int, device: str) -> None:
    if plan == "hybrid" and ranks == 1:
        pytest.skip("has two dimensions")
    need_devices(device, ranks)
    pool.run(ranks, _by_module, plan, None, device=device)
    pool.run(ranks, _by_module, plan, initialise, device=device)


def _whole_model(module: nn.Module) -> None:
    """Writes to all parameters at once, and by `.data`; later numbers depend on how many were drawn
    before.
    """
    if isinstance(module, Net):
        for parameter in module.parameters():
            parameter.data.normal_(std=0.1)
        for block in module.blocks:
            assert isinstance(block, Block)
            block.table.copy_(torch.arange(5))
            block.count.zero_()


@spmd(ranks=[2, 3])
def test_an_initialiser_of_the_whole_model_has_all_parameters_whole() -> None:
    model = _on_meta("fully_shard")
    torch.manual_seed(4)
    materialize(model, _whole_model)
    expected = plain()
    torch.manual_seed(4)
    expected.apply(_whole_model)
    _assert_as_one_process(model, expected)


class _Drawn:
    """An initialiser that fills all parameters of the model from something else than torch's own
    random state.
    """

    def __init__(self, source: str) -> None:
        self._generator = torch.Generator().manual_seed(3)
        numbers, count = np.random.default_rng(3), itertools.count(1)
        draws: dict[str, Callable[[], float]] = {
            "numpy": np.random.rand,
            "random": random.random,
            "a generator of numpy": lambda: float(numbers.random()),
            "a generator of torch": lambda: torch.rand((), generator=self._generator).item(),
            "a counter": lambda: float(next(count)),
        }
        self._draw = draws[source]

    def __call__(self, module: nn.Module) -> None:
        if isinstance(module, Net):
            initialise(module)
            with torch.no_grad():
                for parameter in module.parameters():
                    # reads another unit's, too
                    parameter.fill_(self._draw()).add_(module.embed.weight.sum())
                    parameter.data[:1] *= parameter[-1:].norm().item()
        else:
            initialise(module)


@pytest.mark.parametrize("plan", ["fully_shard", "replicate inside fully_shard", "offloaded"])
@spmd(ranks=2)
def test_an_initialiser_runs_once_and_reads_and_writes_units_below(plan: str) -> None:
    for source in ("numpy", "random", "a generator of numpy", "a generator of torch", "a counter"):
        model, expected = _on_meta(plan), plain(3)
        for each, make in ((model, materialize), (expected, nn.Module.apply)):
            torch.manual_seed(3)
            np.random.seed(3)
            random.seed(3)
            make(each, _Drawn(source))
        _assert_as_one_process(model, expected)


@pytest.mark.parametrize(
    "plan", ["fully_shard", "hybrid", "replicate", "replicate inside fully_shard"]
)
@spmd(ranks=2)
def test_other_values_on_each_rank_are_refused_and_a_second_call_fills_everything_anew(
    plan: str,
) -> None:
    model = _on_meta(plan)

    def draw(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Block):
            module.scale.data.copy_(torch.from_numpy(np.random.rand(1)))

    torch.manual_seed(3)
    np.random.seed(dist.get_rank())
    with pytest.raises(
        RanksDisagreeError,
        match=r"initialisers gave 'blocks\.0\.scale', .*different values on the ranks",
    ):
        materialize(model, draw)
    torch.manual_seed(3)
    np.random.seed(3)
    materialize(model, draw)
    np.random.seed(3)
    _assert_as_one_process(model, _plain_by(draw))
    before = full_state_dict(model, rank0_only=False)
    materialize(model, lambda module: pytest.fail("it has values"))
    assert all(
        torch.equal(value, before[name])
        for name, value in full_state_dict(model, rank0_only=False).items()
    )


def _plain_by(init: Callable[[nn.Module], None]) -> Net:
    model = plain()
    torch.manual_seed(3)
    return model.apply(init)


@spmd(ranks=2)
def test_after_an_error_a_second_call_fills_everything_anew() -> None:
    model, calls = _on_meta("fully_shard"), itertools.count()

    def fails(module: nn.Module) -> None:
        if next(calls) == 8:
            raise ZeroDivisionError
        initialise(module)

    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError):
        materialize(model, fails)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)  # what was in memory
    torch.manual_seed(3)
    materialize(model)
    _assert_as_one_process(model, plain(3))


@pytest.mark.parametrize("plan", ["fully_shard", "one unit"])
@spmd(ranks=2)
def test_ties_that_initialisers_make_or_break_are_refused_and_those_of_before_stay(
    plan: str,
) -> None:
    def again(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Net):
            module.head.weight = module.embed.weight

    def ties(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Net):
            module.blocks[1].up.weight = module.blocks[0].up.weight

    def unties(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Net):
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())

    model = _on_meta(plan)
    for init, said in (
        (ties, r"at 'weight' of a Linear, which is tied to 'blocks\.0\.up\.weight' by that"),
        (unties, r"at 'weight' of a Linear, which is untied from 'embed\.weight' by that"),
    ):
        torch.manual_seed(3)
        with pytest.raises(ForeignParameterError, match=said):
            materialize(model, init)
    torch.manual_seed(3)
    materialize(model, again)
    _assert_as_one_process(model, plain(3))


@pytest.mark.parametrize("plan", ["fully_shard", "replicate", "replicate inside fully_shard"])
@spmd(ranks=2)
def test_attributes_hooks_and_freezing_stay_and_initialisers_see_them(plan: str) -> None:
    with torch.device("meta"):
        model = Net()
    seen: list[str] = []
    model.blocks[1].scale.mark = "before"  # type: ignore[attr-defined]
    PLANS[plan](model)
    model.blocks[1].scale.register_post_accumulate_grad_hook(lambda _: seen.append("hook"))

    def init(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Block):
            seen.extend([module.scale.mark] if hasattr(module.scale, "mark") else [])
            module.norm.weight.mark = "inside"  # type: ignore[assignment]
            module.norm.bias.requires_grad_(False)

    torch.manual_seed(3)
    materialize(model, init)
    _assert_as_one_process(model, plain(3))
    assert (model.blocks[1].scale.mark, model.blocks[0].norm.weight.mark) == ("before", "inside")  # type: ignore[attr-defined]
    model(tokens(0)).sum().backward()
    assert seen == ["before", "hook"]
    assert not model.blocks[0].norm.bias.requires_grad
    assert model.blocks[0].norm.bias.grad is None


@pytest.mark.parametrize("plan", ["fully_shard", "replicate"])
@spmd(ranks=2)
def test_initialisers_may_assign_data_and_write_through_numpy(plan: str) -> None:
    def init(module: nn.Module) -> None:
        initialise(module)
        if isinstance(module, Net):
            module.blocks[0].up.weight.data = torch.full((9, 5), 2.0)
            module.blocks[1].up.weight.detach().numpy()[:] = 3.0
            assert (
                module.blocks[1].down.weight.tolist()
                == module.blocks[1].down.weight.detach().clone().tolist()
            )

    model = _on_meta(plan)
    torch.manual_seed(3)
    materialize(model, init)
    _assert_as_one_process(model, _plain_by(init))


def _replaces(module: nn.Module) -> None:
    if isinstance(module, Block):
        module.scale = nn.Parameter(torch.full((1,), 2.0, device=current_device()))
        module.table = torch.arange(5.0, device=current_device())
        module.count.zero_()
    elif not isinstance(module, Net):
        initialise(module)


@spmd(ranks=2)
def test_initialisers_may_assign_new_parameters_and_buffers() -> None:
    model = _on_meta("fully_shard")
    torch.manual_seed(4)
    materialize(model, _replaces)
    assert full_state_dict(model, rank0_only=False)["blocks.1.scale"].item() == 2.0
    model(tokens(0)).sum().backward()


@spmd(ranks=2)
def test_modules_that_have_memory_keep_it() -> None:
    model = plain(1)
    with torch.device("meta"):
        model.blocks[2] = Block()
    before = {
        name: value.clone() for name, value in model.state_dict().items() if not value.is_meta
    }
    fully_shard(model, policy={Block})
    torch.manual_seed(0)
    materialize(model)
    after = full_state_dict(model, rank0_only=False)
    for name, value in before.items():
        assert torch.equal(after[name], value.cpu()), name


class _WithConfig(nn.Module):
    """Initialised as models of transformers are."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.zero_()


@spmd(ranks=2)
def test_models_of_transformers_are_initialised_by_their_own_method() -> None:
    with torch.device("meta"):
        model = _WithConfig()
    fully_shard(model, policy={nn.Linear})
    torch.manual_seed(0)
    materialize(model)
    expected = _WithConfig().to(current_device())
    torch.manual_seed(0)
    expected.apply(expected._init_weights)
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, expected.state_dict()[name].cpu()), name


@spmd(ranks=2)
def test_to_empty_and_loading_is_another_way() -> None:
    model = _on_meta("fully_shard")
    model.to_empty(device=current_device())
    refresh(model)
    expected = plain(5)
    model.load_state_dict(expected.state_dict())
    for block, other in zip(model.blocks, expected.blocks, strict=True):
        block.table.copy_(other.table)  # in no state dict
    _assert_as_one_process(model, expected)


@spmd(ranks=2)
def test_a_rank_of_which_all_shards_are_empty_follows_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    fully_shard(model, policy={nn.Linear})
    model.to_empty(device=current_device())
    refresh(model)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    assert model(torch.ones(2, 4, device=current_device(), dtype=torch.float64)).tolist() == [
        [5.0],
        [5.0],
    ]


@spmd(ranks=2)
def test_no_more_than_the_largest_unit_is_whole_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    fully_shard(model, policy={nn.Linear})
    whole: list[int] = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
            whole.append(
                sum(parameter.untyped_storage().nbytes() > 0 for parameter in model.parameters())
            )

    torch.manual_seed(0)
    materialize(model, init)
    assert whole == [1] * 8
