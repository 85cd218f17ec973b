"""Copies of annotated models are annotated alike and train apart from the original; replicated ones
pickle as plain models.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from composable import (
    MixedPrecisionPolicy,
    checkpoint,
    describe,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    no_sync,
    register_comm_hook,
    register_forward_method,
    registry,
    remove,
    replicate,
    reshard,
    summon_full_params,
    unshard,
)
from composable.comm.ledger import ledger_of
from composable.errors import AnnotationError
from tests.extensions.rows import Rows
from tests.helpers.battery import BATTERY
from tests.helpers.compare import (
    all_full,
    anatomy,
    differences_in_anatomy,
    differences_in_training,
    distributed_training,
    replica_trainings,
)
from tests.helpers.schemes import SCHEMES
from tests.helpers.world import current_device, spmd

# --- every way to annotate -----------------------------------------------------------------------

_CASES: Final = ("transformer with tied embedding", "odd sizes")


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        ("replicate", 1),
        *((scheme, 2 if 2 in SCHEMES[scheme].ranks else 4) for scheme in SCHEMES),
        ("fully_shard by policy", 3),
    ],
)
@spmd()
def test_a_copy_and_its_original_train_apart_as_one_process_does(scheme: str) -> None:
    for name in _CASES:
        case, ranks, how = BATTERY[name], dist.get_world_size(), SCHEMES[scheme]
        model = case.model(0, dist.get_rank(), current_device())
        case.prepare(model)
        how.annotate(model, case)
        sent = ledger_of(dist.group.WORLD).count
        clone = copy.deepcopy(model)
        assert ledger_of(dist.group.WORLD).count == sent, "a copy sends nothing"
        assert [[*registry(module)] for module in clone.modules()] == [
            [*registry(module)] for module in model.modules()
        ]
        expected = replica_trainings(case, ranks, 2, 0, how.replicated)[dist.get_rank()]
        found = differences_in_anatomy(anatomy(model), anatomy(clone))
        for each in (model, clone):
            found += differences_in_training(expected, distributed_training(case, each, 2, 0))
        third = copy.deepcopy(clone)
        assert all(
            map(torch.equal, all_full([*third.parameters()]), all_full([*clone.parameters()]))
        )
        assert not found, f"{name}: {found[:5]}"


# --- programs that copy -------------------------------------------------------------------------

_PLANS: Final[dict[str, Callable[[nn.Sequential], Any]]] = {
    "fully_shard": lambda model: fully_shard(model, policy={nn.Linear}),
    "replicate": replicate,
    "replicate inside fully_shard": lambda model: (replicate(model[2]), fully_shard(model)),
}
_ALL_PLANS: Final = pytest.mark.parametrize("plan", _PLANS)


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), inner, nn.Linear(5, 3)).to(current_device())


def _annotated(plan: str) -> nn.Sequential:
    model = _plain()
    _PLANS[plan](model)
    return model


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(
        current_device()
    )


def _losses(model: nn.Module, step: int) -> list[Tensor]:
    """On an annotated model that of this rank; on a plain one what makes the mean over all
    ranks.
    """
    if any(registry(module) for module in model.modules()):
        return [model(_batch(step, dist.get_rank())).square().mean()]
    ranks = dist.get_world_size()
    return [model(_batch(step, rank)).square().mean() / ranks for rank in range(ranks)]


def _backward(model: nn.Module, step: int) -> None:
    for loss in _losses(model, step):
        loss.backward()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(model: nn.Module, expected: nn.Module) -> None:
    for found, wanted in zip(all_full([*model.parameters()]), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-6)


def _assert_trains_as_plain(model: nn.Module) -> None:
    expected = _plain()
    _train(model, _optimizer(model), (5, 6))
    _train(expected, _optimizer(expected), (5, 6))
    _assert_same(model, expected)


@_ALL_PLANS
@spmd(ranks=2)
def test_a_copy_between_forward_and_backward_has_no_step_under_way(plan: str) -> None:
    model, expected = _annotated(plan), _plain()
    losses = _losses(model, 0), _losses(expected, 0)
    clone = copy.deepcopy(model)
    _assert_trains_as_plain(clone)
    for loss in (*losses[0], *losses[1]):
        loss.backward()
    for each in (model, expected):
        _optimizer(each).step()
    _assert_same(model, expected)


@_ALL_PLANS
@spmd(ranks=2)
def test_gradients_held_by_no_sync_stay_with_the_original(plan: str) -> None:
    model, expected = _annotated(plan), _plain()
    with no_sync(model):
        _backward(model, 0)
        clone = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in clone.parameters()), (
        "as torch copies parameters"
    )
    _assert_trains_as_plain(clone)
    _backward(expected, 0)
    for each in (model, expected):
        _train(each, _optimizer(each), [1])
    _assert_same(model, expected)


@_ALL_PLANS
@spmd(ranks=2)
def test_a_copy_inside_of_unsharded_has_the_edits(plan: str) -> None:
    model, expected = _annotated(plan), _plain()
    with summon_full_params(model), torch.no_grad():
        model[0].weight += 1
        expected[0].weight += 1
        clone = copy.deepcopy(model)
        model[0].weight -= 1
    for each in (clone, expected):
        _train(each, _optimizer(each), (1, 2))
    _assert_same(clone, expected)
    _assert_trains_as_plain(model)


@spmd(ranks=2)
def test_copies_of_gathered_models_are_sharded() -> None:
    model = _annotated("fully_shard")
    with keep_unsharded(model), torch.no_grad():
        model(_batch(0, 0))
        copies = [copy.deepcopy(model)]
    unshard(model)
    copies.append(copy.deepcopy(model))
    assert not isinstance(model[0].weight, DTensor)
    reshard(model)
    for clone in copies:
        assert all(isinstance(parameter, DTensor) for parameter in clone.parameters())
        _assert_trains_as_plain(clone)


class _CopiesItself(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3))
        self.copies: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        if not self.copies:
            self.copies.append(copy.deepcopy(self))
        return x


@pytest.mark.parametrize("trains", [True, False])
@spmd(ranks=2)
def test_what_was_frozen_after_unshard_is_frozen_in_the_copy(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(current_device())
    model[0].requires_grad_(not trains)
    fully_shard(model, policy={nn.Linear})
    model(torch.ones(1, 3, device=current_device())).sum().backward()
    unshard(model)
    model[0].requires_grad_(trains)
    clone = copy.deepcopy(model)
    reshard(model)
    for each in (model, clone):
        assert [parameter.requires_grad for parameter in each.parameters()] == [trains] * 2 + [
            True
        ] * 2
        each.zero_grad()
        each(torch.ones(1, 3, device=current_device())).sum().backward()
        assert [parameter.grad is not None for parameter in each[0].parameters()] == [trains] * 2


@pytest.mark.parametrize("verb", [fully_shard, replicate])
@spmd(ranks=2)
def test_a_copy_made_in_a_forward_holds_what_rests(verb: Callable[..., nn.Module]) -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = _CopiesItself().to(current_device())
    verb(model, mp_policy=low, sync_module_states="broadcast")
    x = _batch(0, dist.get_rank())
    output = model(x)
    (clone,) = model.copies
    assert isinstance(clone, _CopiesItself)
    assert (clone.linear.weight.dtype, clone.scale.dtype) == (torch.float32, torch.float32)
    assert type(clone.linear.weight) is type(model.linear.weight)
    clone.copies.append(clone)
    assert torch.equal(clone(x), output)
    clone(x).sum().backward()


@_ALL_PLANS
@spmd(ranks=2)
def test_an_optimizer_is_copied_with_its_model(plan: str) -> None:
    model, expected = _annotated(plan), _plain()
    optimizers = _optimizer(model), _optimizer(expected)
    _train(model, optimizers[0], [0])
    _train(expected, optimizers[1], [0])
    clone, first = copy.deepcopy((model, optimizers[0]))
    second, other = copy.deepcopy((optimizers[0], model))
    theirs, reference = copy.deepcopy((expected, optimizers[1]))
    _train(theirs, reference, (1, 2))
    for each, optimizer in ((clone, first), (other, second)):
        _train(each, optimizer, (1, 2))
        _assert_same(each, theirs)
    _assert_same(model, expected)


def test_a_parameter_of_a_class_of_its_own_is_copied_without_a_gradient_in_another_dtype() -> None:
    """torch copies such gradients, and does not copy `grad_dtype`."""
    model = nn.Linear(3, 2, bias=False).bfloat16()
    model.weight = nn.Parameter(Rows(model.weight.detach()))
    kept = MixedPrecisionPolicy(reduce_dtype=torch.float32, keep_grads_in_reduce_dtype=True)
    replicate(model, mp_policy=kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = gradient = torch.ones(2, 3)
    made, its_optimizer = copy.deepcopy((model, optimizer))
    assert model.weight.grad is gradient
    assert made.weight.grad is None
    assert its_optimizer.param_groups[0]["params"][0] is made.weight
    made.weight.grad = torch.ones(2, 3)  # as the original's


@_ALL_PLANS
@spmd(ranks=2)
def test_a_teacher_follows_its_student(plan: str) -> None:
    model, expected = _annotated(plan), _plain()
    for student in (model, expected):
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = _optimizer(student)
        ranks = range(dist.get_world_size()) if student is expected else [dist.get_rank()]
        for step in range(3):
            for rank in ranks:
                x = _batch(step, rank)
                ((student(x) - teacher(x) + 1).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        student.teacher = teacher
    _assert_same(model, expected)  # the teachers' parameters as well


@_ALL_PLANS
@spmd(ranks=2)
def test_a_copy_is_described_loaded_and_removed_by_itself(plan: str) -> None:
    model = _annotated(plan)
    clone = copy.deepcopy(model)
    assert str(describe(clone)) == str(describe(model))
    other = _plain()
    with torch.no_grad():
        other[3].bias.add_(1)
    clone.load_state_dict(other.state_dict())
    loaded = full_state_dict(clone, rank0_only=False)
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in other.state_dict().items())
    _remove_all(clone)
    assert _attributes(clone) == _attributes(other)
    _assert_same(clone, other)
    _assert_trains_as_plain(model)
    clone.load_state_dict(_plain().state_dict())
    _PLANS[plan](clone)
    kept = copy.deepcopy(clone)
    _remove_all(clone)
    _assert_trains_as_plain(kept)


def _remove_all(model: nn.Module) -> None:
    for module in model.modules():
        for verb in reversed([*registry(module)]):
            if verb in registry(module):
                remove(module, verb)


def _attributes(model: nn.Module) -> list[tuple[list[str], list[int]]]:
    """The attributes of all modules, and how many entries each table has."""
    return [
        (
            sorted(vars(module)),
            [len(value) for _, value in sorted(vars(module).items()) if isinstance(value, dict)],
        )
        for module in model.modules()
    ]


@spmd(ranks=2)
def test_a_checkpointed_copy_loses_its_checkpointing_alone() -> None:
    model = _plain()
    checkpoint(model[2])
    fully_shard(model)
    clone = copy.deepcopy(model)
    remove(clone[2], checkpoint)
    assert "checkpoint" in registry(model[2])
    _assert_trains_as_plain(clone)
    _assert_trains_as_plain(model)


@spmd(ranks=2)
def test_arguments_hold_for_the_copy() -> None:
    model, expected = _plain(), _plain()
    for each in (model, expected):
        each[0].bias.requires_grad_(False)
        each[3].bias.requires_grad_(False)
    fully_shard(
        model,
        policy={nn.Linear},
        shard_placement_fn=lambda p: Shard(p.ndim - 1),
        reshard_after_forward=2,
        ignored_params=[model[3].bias],
    )
    clone = copy.deepcopy(model)
    assert clone[0].weight.placements == (Shard(1),)
    assert clone[0].weight.device_mesh is model[0].weight.device_mesh
    for each in (clone, expected):
        _train(each, _optimizer(each), (0, 1))
    _assert_same(clone, expected)


# --- parts, and several models ------------------------------------------------------------------


@spmd(ranks=2)
def test_a_part_is_copied_with_its_own_annotations() -> None:
    x = torch.ones(3, 7, device=current_device())
    for plan in _PLANS:
        model = _annotated(plan)
        inner, linear = copy.deepcopy(model[2]), copy.deepcopy(model[0])
        assert [*registry(inner)] == [*registry(model[2])]
        torch.testing.assert_close(all_full([linear.weight])[0], all_full([model[0].weight])[0])
        if plan != "fully_shard":
            torch.testing.assert_close(inner(x), _plain()[2](x))
        _assert_trains_as_plain(model)


@pytest.mark.parametrize("around", [True, False])
@spmd(ranks=2)
def test_modules_that_are_one_unit_are_copied_as_one(around: bool) -> None:
    model = _plain()
    fully_shard([model[2], model[3]])
    if around:
        fully_shard(model)
        _assert_trains_as_plain(copy.deepcopy(model))
    copies = copy.deepcopy(nn.ModuleList([model[3], model[2]]))
    unit = fully_shard.state([copies[1], copies[0]])
    assert unit is not None
    assert unit.modules == (copies[1], copies[0])
    x = torch.ones(3, 7, device=current_device())
    torch.testing.assert_close(copy.deepcopy(model[2])(x), _plain()[2](x))


@spmd(ranks=2)
def test_models_in_a_container_are_copied_whole() -> None:
    first, second = _annotated("replicate"), _annotated("fully_shard")
    box = copy.deepcopy(nn.ModuleDict({"first": first, "second": second, "again": first}))
    assert box["first"] is box["again"]
    assert replicate.state(box["first"]) is not replicate.state(first)
    for model in (box["first"], box["second"]):
        _assert_trains_as_plain(model)


class _Tied(nn.Module):
    def __init__(self, *, embedding_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table, head = nn.Embedding(8, 4), nn.Sequential(nn.Linear(4, 8, bias=False))
        head[0].weight = table.weight
        parts = {"table": table, "middle": nn.Linear(4, 4), "head": head}
        for name in parts if embedding_first else reversed(parts):
            setattr(self, name, parts[name])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.table(tokens)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("embedding_first", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
@spmd(ranks=2)
def test_tied_parameters_stay_tied_and_can_be_removed(
    replicated: bool, embedding_first: bool
) -> None:
    model, expected = (
        _Tied(embedding_first=embedding_first).to(current_device()) for _ in range(2)
    )
    if replicated:
        replicate(model.table)
    fully_shard(model, policy={nn.Linear})
    clone = copy.deepcopy(model)
    tokens = torch.arange(5, device=current_device())
    for each in (clone, expected):
        optimizer = _optimizer(each)
        for _ in range(2):
            each(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert clone.head[0].weight is clone.table.weight
    _assert_same(clone, expected)
    _remove_all(clone)
    assert clone.head[0].weight is clone.table.weight
    _assert_same(clone, expected)


class _Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        return 2 * self.linear(x)  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_methods_and_communication_hooks_are_those_of_the_copy() -> None:
    calls: dict[str, int] = {"called": 0}

    def hook(state: dict[str, int], bucket: Any) -> Tensor:
        state["called"] += 1
        dist.all_reduce(bucket.buffer())
        return bucket.buffer() / dist.get_world_size()  # type: ignore[no-any-return]

    model = fully_shard(_Generates().to(current_device()), sync_module_states="broadcast")
    register_forward_method(model, "generate")
    register_comm_hook(model, calls, hook)
    clone = copy.deepcopy(model)
    x = _batch(0, dist.get_rank())
    clone(x).sum().backward()
    assert calls["called"] == 0
    model(x).sum().backward()
    assert calls["called"] == 1
    assert all(
        map(
            torch.equal, *(all_full([p.grad for p in each.parameters()]) for each in (model, clone))
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert clone.generate(x).abs().sum() > 0


# --- pickling -----------------------------------------------------------------------------------


def _pickled_and_loaded(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
@spmd(ranks=[1, 2])
def test_a_replicated_model_is_pickled_as_a_plain_one(through: str) -> None:
    reload = _pickled_and_loaded if through == "pickle" else _saved_and_loaded
    model, expected = _annotated("replicate"), _plain()
    checkpoint(model[2])
    loaded, parameters = reload((model, [*model.parameters()]))
    assert [id(parameter) for parameter in loaded.parameters()] == [*map(id, parameters)]
    assert _attributes(loaded) == _attributes(expected)
    _assert_same(loaded, expected)
    for each in (loaded, expected):
        _train(each, _optimizer(each), [0])
    _assert_same(loaded, expected)
    part = reload(model[0])
    torch.testing.assert_close(part(_batch(0, 0)), model[0](_batch(0, 0)))
    _assert_trains_as_plain(model)
    _assert_trains_as_plain(replicate(reload(copy.deepcopy(_annotated("replicate")))))


def test_a_shallow_copy_is_refused_with_what_it_would_share() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    replicate(model)
    with pytest.raises(AnnotationError, match=r"copy\.copy of .*copy\.deepcopy\(module\) makes"):
        copy.copy(model)
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential
