"""A model built on the meta device gets the weights of one process, whatever the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import full_state_dict, fully_shard, materialize, refresh
from composable.errors import NotAnnotatedError, PhaseError, RanksDisagreeError
from tests.helpers.logged import logged
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
    assert torch.equal(after, torch.rand(1)), "the random numbers that follow are those of one process, too"
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
    """Writes to all parameters at once, and by `.data`; later numbers depend on how many were drawn before."""
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
def test_what_no_initialiser_wrote_to_is_named() -> None:
    model = _on_meta("fully_shard")
    with pytest.raises(PhaseError, match=r"^materialize: no initialiser wrote to 'blocks\.0\.scale', .*'blocks\.0\.table'"):
        materialize(model, lambda module: None if isinstance(module, Block) else initialise(module))
    assert isinstance(model.embed.weight, DTensor), "at-rest parameters are registered"


@spmd(ranks=2)
def test_ranks_with_other_seeds_are_refused() -> None:
    model = _on_meta("fully_shard")
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RanksDisagreeError, match="random states of the ranks differ"):
        materialize(model)


@spmd(ranks=2)
def test_modules_that_have_memory_keep_it() -> None:
    model = plain(1)
    with torch.device("meta"):
        model.blocks[2] = Block()
    before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
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
    assert model(torch.ones(2, 4, device=current_device(), dtype=torch.float64)).tolist() == [[5.0], [5.0]]


@spmd(ranks=2)
def test_random_numbers_drawn_shard_by_shard_are_told_once() -> None:
    model = _on_meta("fully_shard")
    torch.manual_seed(0)
    materialize(model)
    with warnings.catch_warnings(), logged() as lines:
        warnings.simplefilter("ignore")  # torch's own, about random operators on hosts
        torch.manual_seed(0)
        model.blocks[1].up.apply(initialise)
        for _ in range(2):
            model(tokens(0)).sum().backward()
    if current_device().type == "cpu":
        (line,) = lines
        assert "'up.weight' of unit 'blocks.1': the shards of all ranks have the same values" in line
        assert "materialize(model, init)" in line


@spmd(ranks=1)
def test_a_plain_model_is_refused() -> None:
    with pytest.raises(NotAnnotatedError, match=r"^materialize: "):
        materialize(nn.Linear(2, 2))


@spmd(ranks=2)
def test_no_more_than_the_largest_unit_is_whole_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    fully_shard(model, policy={nn.Linear})
    whole: list[int] = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            whole.append(sum(not parameter.is_meta for parameter in model.parameters()))
            module.reset_parameters()

    torch.manual_seed(0)
    materialize(model, init)
    assert whole == [1] * 8
