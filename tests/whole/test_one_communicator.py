"""Replicated units below one annotated module share a communicator where collectives are told apart by their order alone.

Ranks run the units in orders of their own and leave out units and layers, so gradients become ready in different orders.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from composable import fully_shard, remove, replicate
from composable.device.collectives import Communicator, communicators_wrapped_by, process_groups
from composable.device.collectives.choice import of_accelerator
from composable.errors import RanksDisagreeError
from composable.model.traversal import get_replicated_states
from tests.helpers.communicators import all_accelerators, all_ordered, all_shared, all_sockets
from tests.helpers.compare import averaged_gradients, full_gradients
from tests.helpers.world import Pool, current_device

WIDTH: Final = 4
CAP: Final = 100 / (1 << 20)  # bytes: several buckets in a unit


def _of_an_accelerator(communicator: Communicator) -> Communicator:
    """What the library would take on an accelerator, to be counted only."""
    group: Any = communicator.group  # type: ignore[attr-defined]
    dedicated = communicator.capabilities.tells_of_leaving and communicator.dedicated  # type: ignore[attr-defined]
    return of_accelerator(group, torch.device("cpu"), dedicated=dedicated)


_WIRES: Final = {
    "ordered": all_ordered,
    "sockets": all_sockets,
    "tags": all_shared,
    "accelerator": all_accelerators,
    "of an accelerator": _of_an_accelerator,
}


class Block(nn.Module):
    """Two layers and a buffer that differs from rank to rank until rank 0's comes."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            self.seen = self.seen + 1 + dist.get_rank()
        y = self.one(x).tanh()
        return x + (y if short else self.two(y)) * self.seen.cos()


class Model(nn.Module):
    """Rows of a sparse table, then blocks. In step `s` rank `r` begins with block `r + s`, leaves one out and shortens one."""

    def __init__(self, count: int = 4, reentrant: int = -1) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, sparse=current_device().type != "sim")  # which has no sparse tensors
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant  # which block runs in a checkpoint of torch's, of the kind that calls backward in backward
        self.hides = False
        self.in_turn = False  # all ranks run all blocks, in one order

    def forward(self, rows: Tensor, step: int) -> Any:
        x = self.table(rows)
        rank, count = dist.get_rank(), len(self.blocks)
        for turn in range(count):
            index = turn if self.in_turn else (rank + step + turn) % count
            if index == (rank + 2 * step) % count != self.reentrant and not self.in_turn:
                continue
            short = index == (2 * rank + step) % count
            if index == self.reentrant:
                x = checkpoint_of_torch(self.blocks[index], x, short, use_reentrant=True)
            else:
                x = self.blocks[index](x, short)
        y = self.head(x) if (rank + step) % 3 else x
        return _Hidden(y) if self.hides else y


class _Hidden:
    """What hooks on outputs do not look into."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


def _by_policy(model: nn.Module) -> None:
    replicate(model, policy={Block, nn.Embedding}, bucket_cap_mb=CAP)


def _one_by_one(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (Block, nn.Embedding)):
            replicate(module, bucket_cap_mb=CAP)


def _in_a_loop(model: nn.Module) -> None:
    _one_by_one(model)
    replicate(model, bucket_cap_mb=CAP)


def _below_shards(model: nn.Module) -> None:
    _one_by_one(model)
    fully_shard(model)


_FORMS: Final = {each.__name__: each for each in (_by_policy, _in_a_loop, _below_shards)}


@contextmanager
def _groups() -> Iterator[list[int]]:
    """Ranks of the process groups that are made in the body."""
    made: list[Any] = []
    real = process_groups.named_group

    def noted(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        made.append(ranks)
        return real(ranks, *args, **kwargs)

    with mock.patch.object(process_groups, "named_group", noted):
        yield made


def communicators_in(model: nn.Module) -> int:
    """How many communicators the replicated units use."""
    return len({id(unit.averaging.communicator) for unit in get_replicated_states(model)})


def _annotated(form: str, communicator: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and an annotated one, which communicates over one communicator."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(**options).to(torch.float64))
    with communicators_wrapped_by(_WIRES[communicator]):
        _FORMS[form](models[1])
    assert (communicators_in(models[1]) == 1) == (communicator != "tags")
    return models[0], models[1]


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    output = model(torch.randint(0, 6, (3,), generator=generator), step)
    return (output.held if isinstance(output, _Hidden) else output).square().sum()  # type: ignore[no-any-return]


def _follow(plain: nn.Module) -> None:
    for buffer in plain.buffers():
        dist.broadcast(buffer, 0)


def compare_gradients(plain: nn.Module, model: nn.Module, step: object) -> None:
    for parameter in plain.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    actual = full_gradients(model)
    for name, mean in averaged_gradients(plain).items():
        gradient = actual[name]
        assert (gradient is None) == (mean is None), (step, name)
        if gradient is not None and mean is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            torch.testing.assert_close(gradient, mean, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{step} {n}: {text}")


def _train(plain: nn.Module, model: nn.Module, steps: int = 4) -> None:
    for step in range(steps):
        _follow(plain)
        for each in (plain, model):
            each.zero_grad()
            _loss(each, step).backward()
        compare_gradients(plain, model, step)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def _parity(form: str, communicator: str, **options: Any) -> None:
    _train(*_annotated(form, communicator, **options))


_ACCELERATOR: Final = pytest.param("accelerator", marks=pytest.mark.host)


@pytest.mark.parametrize("communicator", ["ordered", "sockets", pytest.param("tags", marks=pytest.mark.host), _ACCELERATOR])
@pytest.mark.parametrize("form", _FORMS)
def test_ranks_whose_units_become_ready_in_different_orders_get_the_means(pool: Pool, form: str, communicator: str) -> None:
    pool.run(2, _parity, form, communicator)


@pytest.mark.parametrize("form", ["_by_policy", "_below_shards"])
def test_so_do_four_ranks(pool: Pool, form: str) -> None:
    pool.run(4, _parity, form, "ordered")


@pytest.mark.parametrize("form", ["_by_policy", "_below_shards"])
def test_a_unit_whose_gradients_come_in_a_backward_inside_another_one_belongs_to_the_outer_one(pool: Pool, form: str) -> None:
    pool.run(2, _parity, form, "ordered", reentrant=2)


def _counted(form: str, communicator: str) -> tuple[int, int]:
    model = Model(32)
    with communicators_wrapped_by(_WIRES[communicator]), _groups() as made:
        _FORMS[form](model)
    return communicators_in(model), len(made)


@pytest.mark.beyond_sim("units share a communicator there, whatever is around them")
@pytest.mark.parametrize("form", _FORMS)
def test_many_units_use_one_communicator_and_a_policy_makes_no_other(pool: Pool, form: str) -> None:
    for used, made in pool.run(2, _counted, form, "ordered"):
        assert used == 1
        assert made == (1 if form == "_by_policy" else 33)


def _all_counted() -> tuple[list[int], int]:
    counts = [_counted(form, "of an accelerator") for form in _FORMS]
    return [used for used, _ in counts], sum(made for _, made in counts)


@pytest.mark.host
def test_on_an_accelerator_all_units_of_all_models_use_one_communicator(pool: Pool) -> None:
    """Each costs hundreds of MiB there."""
    for used, made in pool.run(2, _all_counted):
        assert used == [1] * len(_FORMS)
        assert made <= 1, "there may be one from before"


def _without_words_of_the_root(form: str) -> None:
    plain, model = _annotated(form, "ordered")
    plain.hides = model.hides = True  # type: ignore[assignment]
    _train(plain, model)


def test_a_unit_that_backward_comes_to_by_itself_takes_the_others_along(pool: Pool) -> None:
    pool.run(2, _without_words_of_the_root, "_by_policy")


def _after_an_error(form: str) -> None:
    plain, model = _annotated(form, "ordered")
    _train(plain, model, 2)
    for _ in range(2):

        def fail(gradient: Tensor) -> Tensor:
            raise ValueError("on purpose")

        block: Any = model.get_submodule("blocks.1")
        hook = block.one.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        # Both ranks run the same blocks, and fail at the same one.
        with mock.patch.object(dist, "get_rank", return_value=0):
            loss = _loss(model, 3)
        hook.remove()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
    for buffers in zip(plain.buffers(), model.buffers(), strict=True):
        buffers[0].copy_(buffers[1])
    _train(plain, model)


@pytest.mark.parametrize("form", ["_by_policy", "_below_shards"])
def test_an_error_in_the_middle_of_a_backward_leaves_nothing_half_launched(pool: Pool, form: str) -> None:
    pool.run(2, _after_an_error, form)


def _without_the_module_around(form: str, verb: str) -> None:
    plain, model = _annotated(form, "ordered")
    _train(plain, model, 2)
    remove(model, verb)
    assert communicators_in(model) == 5
    for module in (plain, model):
        module.get_submodule("head").requires_grad_(False)  # nobody averages its gradients any more
        module.in_turn = True  # type: ignore[assignment]
    _train(plain, model)
    replicate(model)
    assert communicators_in(model) == 1
    for module in (plain, model):
        module.requires_grad_(True)
        module.in_turn = False  # type: ignore[assignment]
    _train(plain, model)


@pytest.mark.beyond_sim("units share a communicator there, whatever is around them")
@pytest.mark.parametrize(("form", "verb"), [("_in_a_loop", "replicate"), ("_below_shards", "fully_shard")])
def test_units_go_back_to_what_they_communicated_over_when_the_module_around_them_is_no_longer_annotated(
    pool: Pool, form: str, verb: str
) -> None:
    pool.run(2, _without_the_module_around, form, verb)


def _in_other_orders() -> str:
    """Units share their buffers where they are called, if the module around them is not."""
    _, model = _annotated("_by_policy", "ordered")
    blocks: Any = model.get_submodule("blocks")
    with pytest.raises(RanksDisagreeError) as caught:
        blocks[dist.get_rank()](torch.ones(3, WIDTH, dtype=torch.float64))
    return str(caught.value)


def test_units_with_buffers_that_are_called_without_the_module_around_them_must_be_called_in_one_order(pool: Pool) -> None:
    assert pool.run(2, _in_other_orders) == [
        f"replicate: rank {rank} calls unit 'blocks.{rank}', whose buffers follow rank 0, where another rank calls another "
        "unit. Call such units in the same order on every rank, or call the annotated module around them"
        for rank in range(2)
    ]


def _freezing(communicator: str) -> None:
    plain, model = _annotated("_by_policy", communicator)
    for step, frozen in enumerate([[], ["blocks.2.two", "blocks.3.one"], ["blocks.0.one"], []]):
        _follow(plain)
        for each in (plain, model):
            each.requires_grad_(True)
            for name in frozen:
                each.get_submodule(name).requires_grad_(False)
            each.zero_grad()
            _loss(each, step).backward()
        compare_gradients(plain, model, step)


@pytest.mark.parametrize("communicator", ["ordered", pytest.param("tags", marks=pytest.mark.host)])
def test_a_unit_that_a_rank_leaves_out_launches_what_it_launches_on_the_others_when_its_layers_are_frozen(
    pool: Pool, communicator: str
) -> None:
    pool.run(2, _freezing, communicator)


def _copies(communicator: str) -> None:
    plain, model = _annotated("_by_policy", communicator)
    _train(plain, model, 2)
    others = copy.deepcopy(plain), copy.deepcopy(model)
    _train(plain, model)
    _train(*others)
    both = nn.ModuleList([plain, others[0]]), nn.ModuleList([model, others[1]])
    for step in range(3):
        _follow(both[0])
        for pair in both:
            pair.zero_grad()
            (_loss(pair[0], step) + _loss(pair[1], step + 1)).backward()
        compare_gradients(*both, step)


@pytest.mark.parametrize("communicator", ["ordered", "sockets", pytest.param("tags", marks=pytest.mark.host)])
def test_copies_train_in_turn_and_in_one_backward(pool: Pool, communicator: str) -> None:
    pool.run(2, _copies, communicator)
