"""`apply_optimizer_in_backward`: the same bits as a step after backward, and what does not go
together with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
)
from composable.engine.step.unit import units_below
from composable.errors import ClippingError, OptimizerError
from tests.helpers.world import current_device, spmd
from tests.optim.copies import local

WIDTH: Final = 6
SGD: Final = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAMW: Final = (torch.optim.AdamW, {"lr": 0.05})
ADAGRAD: Final = (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        x = self.norm(x)
        return x + self.down(self.up(x).tanh()) if whole else x  # type: ignore[no-any-return]


class Model(nn.Module):
    """Uses its first block twice, and its last one as a whole where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, last: bool = True) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks:
            x = block(x, whole=last or block is not self.blocks[-1])
        return self.head(x) * self.scale  # type: ignore[no-any-return]


Annotate = Callable[[Model], object]


def _sharded(model: Model) -> None:
    fully_shard(model, policy={Block})


def _hybrid(model: Model) -> None:
    size = dist.get_world_size()
    shape = (2, size // 2) if size > 1 else (1, 1)
    mesh = init_device_mesh(current_device().type, shape, mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, policy={Block})


def _in_bfloat16(model: Model) -> None:
    fully_shard(
        model,
        policy={Block},
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def _checkpointed(model: Model) -> None:
    for block in model.blocks:
        checkpoint(block)
    fully_shard(model, policy={Block})


def _frozen(model: Model) -> None:
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    fully_shard(model, policy={Block})


def _replicated(model: Model) -> None:
    replicate(model, bucket_cap_mb=0.0005)


def _replicated_in_bfloat16(model: Model) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replicate(model, bucket_cap_mb=0.0005, mp_policy=policy)


def _hooked(model: Model) -> None:
    _replicated(model)
    register_comm_hook(model, None, fp16_compress_hook)


def _tied(model: Model) -> None:
    model.blocks[2].down.weight = model.blocks[0].down.weight
    _sharded(model)


def _tied_and_replicated(model: Model) -> None:
    model.blocks[2].down.weight = model.blocks[0].down.weight
    _replicated(model)


def _mixed(model: Model) -> None:
    replicate(model.blocks[1])
    fully_shard(model, policy={Block})


SCHEMES: Final[dict[str, Annotate]] = {
    "units": _sharded,
    "one unit": lambda model: fully_shard(model, reshard_after_forward=True),
    "kept": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=False),
    "hybrid": _hybrid,
    "bfloat16": _in_bfloat16,
    "checkpointed": _checkpointed,
    "frozen": _frozen,
    "replicated": _replicated,
    "replicated in bfloat16": _replicated_in_bfloat16,
    "hooked": _hooked,
    "tied": _tied,
    "tied and replicated": _tied_and_replicated,
    "mixed": _mixed,
    "plain": lambda model: None,
}
VERBS: Final = (_sharded, _replicated)


def _model(annotate: Annotate | None) -> Model:
    torch.manual_seed(0)
    model = Model().to(current_device())
    if annotate is not None:
        annotate(model)
    return model


def _batches(count: int) -> Iterator[Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(3, WIDTH).to(current_device())


def _x() -> Tensor:
    return next(_batches(1))


def _values(model: nn.Module) -> list[Tensor]:
    return [local(parameter).detach().clone() for parameter in model.parameters()]


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_values(one), _values(other), strict=True))


# --- what it does -------------------------------------------------------------------------------

Step = Callable[[nn.Module, Tensor, int], None]


def _plain_step(model: nn.Module, x: Tensor, turn: int) -> None:
    model(x).square().mean().backward()


def _accumulated(model: nn.Module, x: Tensor, turn: int) -> None:
    """The last micro-batch does not use all of the last block."""
    for number in range(2):
        with nullcontext() if number else no_sync(model):
            model(x * (1 + number), last=not number).square().mean().backward()


def _reduced_by_hand(model: nn.Module, x: Tensor, turn: int) -> None:
    with no_sync(model):
        for number in range(2):
            model(x * (1 + number)).square().mean().backward()
    reduce_gradients(model)


def _used_on_one_rank(model: nn.Module, x: Tensor, turn: int) -> None:
    model(x, last=dist.get_rank() == turn % 2).square().mean().backward()


def _train_copies(
    annotate: Annotate, optimizer_class: Any, options: dict[str, Any], run: Step
) -> None:
    after, early = _model(annotate), _model(annotate)
    usual = optimizer_class(after.parameters(), **options)
    in_backward = apply_optimizer_in_backward(optimizer_class, early.parameters(), options)
    for turn, x in enumerate(_batches(2)):
        run(after, x, turn)
        usual.step()
        usual.zero_grad()
        run(early, x, turn)
        assert all(parameter.grad is None for parameter in early.parameters()), turn
        assert _same(after, early), turn
        for each in (usual, in_backward):
            each.param_groups[0]["lr"] *= 0.5
    for one, other in zip(after.parameters(), early.parameters(), strict=True):
        for key, value in usual.state.get(one, {}).items():
            assert torch.equal(local(in_backward.state[other][key]), local(value)), key
    assert local(early.scale).item() != pytest.approx(0.7), "it trained"


@spmd(ranks=[1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_are_what_a_step_after_backward_makes_of_them(scheme: str) -> None:
    _train_copies(SCHEMES[scheme], *ADAMW, _plain_step)
    if scheme != "plain":
        _train_copies(SCHEMES[scheme], *SGD, _accumulated)


@spmd(ranks=2)
def test_state_that_an_optimizer_has_from_the_start_is_kept() -> None:
    for annotate in VERBS:
        _train_copies(annotate, *ADAGRAD, _plain_step)


@spmd(ranks=[2, 4])
@pytest.mark.parametrize("scheme", ["units", "hybrid", "replicated", "mixed"])
def test_nothing_is_stepped_before_its_gradient_is_reduced(scheme: str) -> None:
    for program in (_reduced_by_hand, _used_on_one_rank):
        _train_copies(SCHEMES[scheme], *ADAMW, program)


@spmd(ranks=2)
def test_two_of_them_share_a_unit_and_another_optimizer_has_the_rest() -> None:
    for annotate in VERBS:
        models = [_model(annotate) for _ in range(2)]
        lists: list[list[list[nn.Parameter]]] = [[], [], []]
        for model in models:
            named = list(model.named_parameters())
            lists[0].append(
                [p for name, p in named if name.endswith("weight") and "up" not in name]
            )
            lists[1].append([p for name, p in named if name.endswith("bias")])
            lists[2].append([p for name, p in named if "up.weight" in name or name == "scale"])
        kinds: list[tuple[Any, float]] = [
            (torch.optim.SGD, 0.3),
            (torch.optim.AdamW, 0.1),
            (torch.optim.SGD, 0.2),
        ]
        for (kind, rate), pair in zip(kinds[:2], lists[:2], strict=True):
            apply_optimizer_in_backward(kind, pair[0], {"lr": rate})
        last = torch.optim.SGD(lists[2][0], lr=0.2)
        usual = [kind(pair[1], lr=rate) for (kind, rate), pair in zip(kinds, lists, strict=True)]
        for x in _batches(2):
            for model in models:
                model(x).sum().backward()
            for each in (last, *usual):
                each.step()
                each.zero_grad()
            assert _same(*models)


class _Summed(torch.autograd.Function):
    """A collective in the middle of the model's own backward, as experts have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


class _Optional(nn.Module):
    """A layer that some calls leave out, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, *, whole: bool) -> Tensor:
        x = _Summed.apply(self.layers[0](x))  # type: ignore[no-untyped-call]
        return self.layers[2](self.layers[1](x) if whole else x)  # type: ignore[no-any-return]


@spmd(ranks=2)
def test_ranks_that_differ_in_what_they_use_do_not_wait_before_a_collective_of_the_model() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(replicate(_Optional().to(current_device()), bucket_cap_mb=1e-5))
    apply_optimizer_in_backward(torch.optim.SGD, models[0].parameters(), {"lr": 0.1})
    after = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for step in range(3):
        for model in models:
            model(_x(), whole=(dist.get_rank() + step) % 2 == 0).square().mean().backward()
        after.step()
        after.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@spmd(ranks=2)
def test_hooks_of_users_see_the_gradient_before_the_step_and_unfrozen_parameters_are_stepped() -> (
    None
):
    model = _model(_sharded)
    before = _values(model)
    model.head.requires_grad_(False)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    seen: list[bool] = []
    model.blocks[0].up.weight.register_hook(lambda gradient: seen.append(gradient is not None))
    model(_x()).sum().backward()
    assert seen == [True]
    moved = [not torch.equal(old, new) for old, new in zip(before, _values(model), strict=True)]
    assert any(moved)
    assert not any(moved[-2:]), "the head is frozen"
    model.head.requires_grad_(True)
    head = local(model.head.bias).detach().clone()
    model(_x()).sum().backward()
    assert not torch.equal(head, local(model.head.bias))


@spmd(ranks=[1, 2])
def test_state_is_saved_loaded_and_scheduled_as_that_of_any_optimizer() -> None:
    for annotate in VERBS:
        models = [_model(annotate) for _ in range(2)]
        optimizers = [
            apply_optimizer_in_backward(torch.optim.AdamW, m.parameters(), {"lr": 0.1})
            for m in models
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
        for x in _batches(2):
            models[0](x).sum().backward()
            optimizers[0].step()  # nothing to do
            optimizers[0].zero_grad()
            scheduler.step()
        assert optimizers[0].param_groups[0]["lr"] == 0.025
        saved = get_optimizer_state_dict(models[0], optimizers[0])
        assert "head.weight" in saved["state"], "by FQN"
        set_optimizer_state_dict(models[1], optimizers[1], copy.deepcopy(saved))
        models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
        for model in models:
            model(_x()).sum().backward()
        assert _same(*models)
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model in models:
            model(_x()).sum().backward()
        assert _same(*models)


# --- what is refused ----------------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_other_optimizers_clipping_and_closures_are_refused_by_name_until_it_is_removed() -> None:
    for annotate in VERBS:
        model = _model(annotate)
        before = _values(model)
        optimizer = apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        usual = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(
            OptimizerError,
            match=r"SGD.step: parameter '.*' of unit '.*' is stepped in backward already",
        ):
            usual.step()
        with pytest.raises(
            ClippingError, match=r"parameter '.*' of unit '.*' is stepped in backward"
        ):
            clip_grad_norm_(model, 1.0)
        with pytest.raises(
            OptimizerError, match=r"of unit '.*' is stepped in backward already. Call remove"
        ):
            apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        with pytest.raises(OptimizerError, match="takes no second parameter group"):
            optimizer.add_param_group({"params": [nn.Parameter(_x())]})
        with pytest.raises(OptimizerError, match="given a closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(OptimizerError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        optimizer.zero_grad()
        optimizer.remove()
        optimizer.remove()
        model(_x()).sum().backward()
        assert all(torch.equal(old, new) for old, new in zip(before, _values(model), strict=True))
        usual.step()
        assert not all(
            torch.equal(old, new) for old, new in zip(before, _values(model), strict=True)
        )


# --- memory -------------------------------------------------------------------------------------

UNITS: Final = 12
WIDE: Final = 256


def _gradient_bytes(model: nn.Module) -> int:
    """Of all memory that gradients live in now."""
    units = units_below([model])
    buckets = [bucket for unit in units for bucket in unit.gradients.buckets]
    roots = dict.fromkeys(unit.root for unit in units if unit.root is not None)
    buckets += [each for root in roots for each in root.post_backward.buckets.buckets]
    parameters = [*model.parameters(), *(p for bucket in buckets for p in bucket.compute)]
    tensors = [
        *(p.grad for p in parameters),
        *(bucket.reduction.flat for bucket in buckets if bucket.reduction is not None),
    ]
    local = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in tensors
        if each is not None
    ]
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in local
    }
    messages = [
        plan.message.nbytes
        for bucket in buckets
        for plan in bucket.reducer.plans.values()
        if plan.message.held
    ]
    return sum(storages.values()) + sum(messages)


class _Watched(torch.optim.SGD):
    """Notes how many bytes of gradients there are at each step."""

    model: nn.Module
    seen: list[int]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(_gradient_bytes(self.model))
        super().step()


def _peak(annotate: Callable[[nn.Module], Any], *, early: bool) -> int:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(UNITS)]
    model = nn.Sequential(*layers).to(current_device())
    # ranks go through them together, or sums would be there when the slowest rank wants them to be
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: dist.barrier())
    annotate(model)
    _Watched.model, _Watched.seen = model, []
    usual = None if early else _Watched(model.parameters(), lr=0.1)
    if early:
        apply_optimizer_in_backward(_Watched, model.parameters(), {"lr": 0.1})
    for _ in range(3):
        _Watched.seen = []
        model(torch.randn(2, WIDE, device=current_device(), requires_grad=True)).sum().backward()
        if usual is not None:
            usual.step()
            usual.zero_grad()
    if early:
        assert _gradient_bytes(model) <= WIDE * WIDE * 4
    return max(_Watched.seen) // (WIDE * WIDE * 4)  # in layers


@spmd(ranks=2)
def test_gradients_are_given_back_when_their_unit_has_been_stepped() -> None:
    def sharded(model: nn.Module) -> None:
        fully_shard(model, policy={nn.Linear})

    def replicated(model: nn.Module) -> None:
        replicate(model, bucket_cap_mb=0.25)

    every_layer = UNITS // dist.get_world_size()
    assert _peak(sharded, early=False) == every_layer, "the watch sees them all"
    assert _peak(sharded, early=True) <= 2
    assert _peak(replicated, early=False) >= UNITS, "the watch sees them all"
    assert _peak(replicated, early=True) <= UNITS // 2
