"""A step that one rank loses is lost on all ranks, wherever it raises, and the next ones give the
bits of a run that never had that batch.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    EMA,
    MixedPrecisionPolicy,
    average_parameters,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    keep_unsharded,
    no_sync,
    reduce_gradients,
    replicate,
    summon_full_params,
    together,
    unshard,
)
from composable.comm import observe_launches
from composable.engine.step import root
from composable.errors import PhaseError, StepLostError
from tests.helpers.compare import all_full
from tests.helpers.world import current_device, spmd

WIDTH: Final = 5  # uneven over 2 and 4 ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(torch.tanh(self.norm(self.linear(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def _mixed(model: Model) -> None:
    replicate(model.blocks[1])
    fully_shard(model, policy={Block})


def _recomputed(model: Model) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block})


def _hybrid(model: Model) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(current_device().type, (2, ranks // 2))
    fully_shard(model, policy={Block}, mesh=mesh)


def _low(model: Model) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, full_precision_classes=(nn.BatchNorm1d,)
    )
    fully_shard(model, policy={Block}, mp_policy=policy)


ANNOTATIONS: Final[dict[str, Callable[[Model], object]]] = {
    "shards": lambda model: fully_shard(model, policy={Block}),
    "kept": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=False),
    "resharded": lambda model: fully_shard(model, policy={Block}, reshard_after_forward=True),
    "one unit": fully_shard,
    "hybrid": _hybrid,
    "mixed": _mixed,
    "recomputed": _recomputed,
    "low": _low,
    "replicate": replicate,
    "views": lambda model: replicate(model, gradient_as_bucket_view=True),
    "small buckets": lambda model: replicate(model, bucket_cap_mb=1e-4),
}


def _batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(current_device())


class Trainer:
    """A model and its steps; `fails` makes one raise on this rank."""

    def __init__(self, annotate: Callable[[Model], object], *, micro_batches: int = 1) -> None:
        self.model = Model().to(current_device())
        annotate(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.micro_batches = micro_batches

    def step(
        self,
        number: int,
        fails: Callable[[Model], Any] = lambda _: nullcontext(),
        says: str = "",
    ) -> str:
        """Returns why the step was lost; nothing if it was not. `says`: what this rank calls `lose`
        with, between the last forward and its backward.
        """
        torch.manual_seed(number)
        with together(self.model, give_up_after=2) as step, fails(self.model):
            for micro_batch in range(self.micro_batches):
                last = micro_batch == self.micro_batches - 1
                with no_sync(self.model, enabled=not last):
                    loss = self.model(_batch(10 * number + micro_batch)).square().mean()
                    if says and last:
                        step.lose(says)
                    loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
        if not step.lost:
            self.optimizer.step()
        self.optimizer.zero_grad()
        assert step.lost == bool(step.why)
        return step.why

    def state(self) -> list[Tensor]:
        with torch.no_grad():
            return [*all_full([*self.model.parameters()]), *self.model.buffers()]


# --- places where a step raises ------------------------------------------------------------------


def _fail(*_: object) -> None:
    raise MemoryError("as planned")


@contextmanager
def _before_launch(number: int) -> Iterator[None]:
    seen = itertools.count()

    def note(*_: object) -> None:
        if next(seen) == number:
            _fail()

    end = observe_launches(launching=note)
    try:
        yield
    finally:
        end()


def _in_forward(model: Model, block: int) -> Any:
    return model.blocks[block].linear.register_forward_pre_hook(_fail)


@contextmanager
def _in_backward(model: Model, block: int) -> Iterator[None]:
    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(_fail)

    with model.blocks[block].norm.register_forward_hook(spoil):
        yield


@contextmanager
def _as_a_gradient_lands(model: Model, block: int) -> Iterator[None]:
    handle = model.blocks[block].linear.weight.register_post_accumulate_grad_hook(_fail)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _before_anything() -> Iterator[None]:
    _fail()
    yield


@contextmanager
def _behind_everything() -> Iterator[None]:
    yield
    _fail()


PLACES: Final[dict[str, Callable[[Model], Any]]] = {
    "outside of all units": lambda _: _before_anything(),
    "in the forward of unit 'blocks.0'": lambda model: _in_forward(model, 0),
    "in the forward of unit 'blocks.2'": lambda model: _in_forward(model, 2),
    "in backward, near unit 'blocks.2'": lambda model: _in_backward(model, 2),
    "in backward, near unit 'blocks.0'": lambda model: _in_backward(model, 0),
    "as a gradient lands": lambda model: _as_a_gradient_lands(model, 1),
    "as the last gradient lands": lambda model: _as_a_gradient_lands(model, 0),
    "outside": lambda _: _behind_everything(),
}


def _launches_of(trainer: Trainer, number: int) -> int:
    noted: list[object] = []
    end = observe_launches(launched=lambda *_: noted.append(None))
    try:
        assert trainer.step(number) == ""
    finally:
        end()
    return len(noted) - 1  # the vote


def _check(name: str, micro_batches: int = 1) -> None:
    annotate = ANNOTATIONS[name]
    trainer = Trainer(annotate, micro_batches=micro_batches)
    reference = Trainer(annotate, micro_batches=micro_batches)
    for number in range(3):  # the first ones agree on orders, and cannot be followed
        assert trainer.step(number) == reference.step(number) == ""
    launches = _launches_of(trainer, 3)
    reference.step(3)
    faults: list[tuple[str, Callable[[Model], Any]]] = [*PLACES.items()]
    faults += [("", lambda _, at=at: _before_launch(at)) for at in range(launches)]
    numbers = itertools.count(4)
    ranks = range(dist.get_world_size())
    # of two ranks each raises everywhere; of more ranks one does, in turns
    everywhere = len(ranks) == 2
    cases = itertools.product(faults, ranks) if everywhere else zip(faults, itertools.cycle(ranks))
    for (where, fails), rank in cases:
        mine = fails if rank == dist.get_rank() else lambda _: nullcontext()
        why = trainer.step(next(numbers), mine)
        assert why.startswith(f"rank {rank}: MemoryError ")
        assert why.endswith(": as planned")
        if where.startswith(("in", "outside")) and name in ("shards", "kept", "resharded"):
            assert where in why
        number = next(numbers)
        assert trainer.step(number) == reference.step(number) == ""
    for mine, expected in zip(trainer.state(), reference.state(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("name", [name for name in ANNOTATIONS if name != "hybrid"])
@spmd(ranks=[2, 4])
def test_a_step_is_lost_on_all_ranks_wherever_one_raises(name: str) -> None:
    _check(name)


@spmd(ranks=4)
def test_on_a_hybrid_mesh() -> None:
    _check("hybrid")


@pytest.mark.parametrize("name", ["shards", "replicate", "mixed"])
@spmd(ranks=[2, 3])
def test_a_scope_holds_all_micro_batches(name: str) -> None:
    _check(name, micro_batches=2)


@mock.patch.object(root, "debug_enabled", return_value=True)
def _while_ranks_are_compared(name: str, _: object) -> None:
    _check(name)


@pytest.mark.parametrize("name", ["shards", "replicate"])
@spmd(ranks=2)
def test_while_ranks_are_compared(name: str) -> None:
    _while_ranks_are_compared(name)


# --- a rank says that it is to be lost ------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ANNOTATIONS if name != "hybrid"])
@spmd(ranks=[2, 3])
def test_a_step_that_a_rank_gives_up_is_lost_on_all_ranks_from_the_first_on(name: str) -> None:
    trainer = Trainer(ANNOTATIONS[name], micro_batches=2)
    reference = Trainer(ANNOTATIONS[name], micro_batches=2)
    rank, fails = dist.get_rank(), PLACES["in the forward of unit 'blocks.2'"]
    for number in range(6):
        said = number % dist.get_world_size()
        assert trainer.step(10 + number, says="a spike" if rank == said else "") == (
            f"rank {said}: a spike"
        )
        assert trainer.step(number) == reference.step(number) == ""
    # one says so, and another one raises; then each of them says so
    why = trainer.step(20, fails if rank == 0 else lambda _: nullcontext(), "bad" if rank else "")
    assert why.startswith("rank 0: MemoryError")
    assert why.endswith(
        "as planned" + "".join(f"; rank {r}: bad" for r in range(1, dist.get_world_size()))
    )
    assert trainer.step(6) == reference.step(6) == ""
    assert trainer.step(21, says="bad") == "; ".join(
        f"rank {each}: bad" for each in range(dist.get_world_size())
    )
    assert trainer.step(7) == reference.step(7) == ""
    for mine, expected in zip(trainer.state(), reference.state(), strict=True):
        assert torch.equal(mine, expected)


@spmd(ranks=2)
def test_steps_given_up_in_a_row_are_an_error_and_behind_the_scope_it_is_too_late() -> None:
    class Unpicklable(Exception):
        """Not found where it says that it is."""

    trainer, reference = Trainer(ANNOTATIONS["shards"]), Trainer(ANNOTATIONS["shards"])
    says = "a spike" if dist.get_rank() else ""
    assert trainer.step(0, says=says)
    with pytest.raises(StepLostError, match=r"2 steps in a row .* The last one: rank 1: a spike"):
        trainer.step(1, says=says)
    trainer.optimizer.zero_grad()
    assert trainer.step(2) == reference.step(2) == ""
    with together(trainer.model) as step:
        trainer.model(_batch(2)).sum().backward()
        step.lose("twice")
        step.lose("")
        step.lose(Unpicklable("x"))  # type: ignore[arg-type]
    trainer.optimizer.zero_grad()
    assert step.why == "; ".join(
        f"rank {rank}: {text}" for rank in range(2) for text in ("twice", "", "x")
    )
    with pytest.raises(PhaseError, match=r"lose\('late'\) was called outside of the scope"):
        step.lose("late")
    assert trainer.step(3) == reference.step(3) == ""  # what is left out is no step
    both = [all_full([*each.model.parameters()]) for each in (trainer, reference)]
    assert all(map(torch.equal, *both))


# --- what is raised ------------------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_an_error_on_all_ranks_is_raised() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    for number in range(3):
        trainer.step(number)
    with pytest.raises(MemoryError, match="as planned"):
        trainer.step(3, PLACES["in the forward of unit 'blocks.2'"])
    assert trainer.step(4) == ""


@spmd(ranks=2)
def test_the_last_of_several_lost_steps_is_an_error_on_all_ranks() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    for number in range(3):
        trainer.step(number)
    fails = PLACES["in the forward of unit 'blocks.2'"]
    mine = fails if dist.get_rank() == 1 else lambda _: nullcontext()
    assert trainer.step(3, mine)
    with pytest.raises(StepLostError, match=r"2 steps in a row were lost\. The last one: rank 1"):
        trainer.step(4, mine)
    assert trainer.step(5) == ""


@spmd(ranks=3)
def test_ranks_that_raise_at_different_places_are_both_named() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    for number in range(3):
        trainer.step(number)
    first, second = "in the forward of unit 'blocks.2'", "in backward, near unit 'blocks.0'"
    fails = [PLACES[first], PLACES[second], lambda _: nullcontext()]
    why = trainer.step(3, fails[dist.get_rank()])
    assert why == (
        f"rank 0: MemoryError {first}: as planned; rank 1: MemoryError {second}: as planned"
    )
    assert trainer.step(4) == ""


class _Interrupted(BaseException):
    """As KeyboardInterrupt."""


@spmd(ranks=2)
def test_what_is_no_exception_is_raised_on_its_rank() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])

    def interrupt(*_: object) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):  # on both: the other rank would wait
        trainer.step(0, lambda model: model.blocks[0].register_forward_pre_hook(interrupt))
    assert trainer.step(1) == ""


@spmd(ranks=2)
def test_the_first_step_cannot_be_followed() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    with pytest.raises(MemoryError) as raised:  # on both: the other rank would wait
        trainer.step(0, PLACES["in the forward of unit 'blocks.2'"])
    (note,) = [each for each in raised.value.__notes__ if "together" in each]
    assert note == (
        "together: this step was not given up together with the other ranks, since no step before"
        " it was whole. Ranks that did not raise wait for this one until their timeout"
    )
    assert trainer.step(1) == ""
    with pytest.raises(MemoryError) as raised:
        trainer.step(2, PLACES["in the forward of unit 'blocks.2'"])
    (note,) = [each for each in raised.value.__notes__ if "together" in each]
    assert "made the check of the order of units" in note


@spmd(ranks=1)
def test_a_scope_that_raised_holds_no_buffers_and_no_frames() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).to(current_device())
    replicate(model)
    held: list[weakref.ref[Tensor]] = []

    def fail(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        activation = args[0] * 2
        held.append(weakref.ref(activation))
        raise MemoryError

    model[1].register_forward_pre_hook(fail)
    scope = together(model)
    with contextlib.suppress(MemoryError), scope:
        held += [weakref.ref(copy) for *_, copy in scope._buffers]
        model(torch.ones(3, 2, device=current_device()))
    assert len(held) == 4
    assert [each for each in held if each() is not None] == []


@spmd(ranks=2)
def test_a_step_of_another_kind_cannot_be_followed() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    for number in range(3):
        trainer.step(number)
    trainer.micro_batches = 2
    with pytest.raises(MemoryError) as raised:
        trainer.step(3, lambda model: _as_a_gradient_lands(model, 0))
    assert any("launched something else than the step before" in n for n in raised.value.__notes__)
    assert trainer.step(4) == ""


@spmd(ranks=2)
def test_activations_are_freed_before_the_others_are_followed() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    for number in range(3):
        trainer.step(number)
    kept: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    @contextmanager
    def fail(model: Model) -> Iterator[None]:
        def keep(module: nn.Module, args: object, output: Tensor) -> None:
            kept.append(weakref.ref(output))

        with (
            model.blocks[0].linear.register_forward_hook(keep),  # which the norm saves
            _in_forward(model, 2),
        ):
            yield

    def note(*_: object) -> None:
        alive.append(bool(kept) and kept[0]() is not None)

    end = observe_launches(launched=note)
    try:
        assert trainer.step(3, fail if dist.get_rank() == 0 else lambda _: nullcontext())
    finally:
        end()
    if dist.get_rank() == 0:
        first = alive.index(True)  # while the step was computed
        followed = alive[first:].index(False)
        assert followed < 3
        assert not any(alive[first + followed :])


@spmd(ranks=2)
def test_a_scope_may_be_used_again() -> None:
    model = fully_shard(Model().to(current_device()), policy={Block})
    scope, lost = together(model), []
    for number in range(5):
        with scope as step:
            if number == 3 and dist.get_rank() == 1:
                raise MemoryError("as planned")
            model(_batch(number)).sum().backward()
        model.zero_grad()
        lost.append(step.lost)
    assert lost == [False, False, False, True, False]


class _Growing(nn.Module):
    """A table that grows with its inputs, as caches of rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor, size: int) -> Tensor:
        if len(self.table) < size:
            self.table = torch.ones(size, device=x.device)
        y: Tensor = self.linear(x) + self.table.sum()
        return y


@spmd(ranks=2)
def test_a_buffer_that_grew_in_a_lost_step_is_as_before() -> None:
    model = _Growing().to(current_device())
    fully_shard(model)
    before = model.table
    for number in range(4):
        with together(model) as step:
            y = model(_batch(number), 2 + (number == 3))
            if number == 3 and dist.get_rank() == 1:
                raise MemoryError("as planned")
            y.sum().backward()
        model.zero_grad()
    assert step.lost
    assert model.table is before
    assert model.table.tolist() == [0.0, 0.0]


@spmd(ranks=2)
def test_a_buffer_whose_cast_a_scope_shows_has_its_dtype_behind_a_lost_step() -> None:
    model = Model().to(current_device())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    fully_shard(model, policy={Block}, mp_policy=policy)
    for number in range(4):
        before = [each.clone() for each in model.buffers()]
        with keep_unsharded(model) if number > 1 else nullcontext(), together(model) as step:
            model(_batch(number)).sum().backward()
            if number == 3 and dist.get_rank() == 1:
                _fail()
        model.zero_grad()
    assert step.lost
    for mine, expected in zip(model.buffers(), before, strict=True):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("name", ["shards", "replicate"])
@spmd(ranks=2)
def test_a_rank_that_has_not_come_to_a_swap_of_averages_and_says_nothing(name: str) -> None:
    trainer, reference = Trainer(ANNOTATIONS[name]), Trainer(ANNOTATIONS[name])
    averages = [EMA(each.model, decay=0.5) for each in (trainer, reference)]
    for number in range(5):
        for each, average in zip((trainer, reference), averages, strict=True):
            fails = number == 3 and each is trainer
            torch.manual_seed(number)
            with together(each.model) as step:
                if fails and dist.get_rank() == 1:
                    raise _Mute
                with average.swap(), torch.no_grad():
                    each.model.eval()(_batch(0))
                each.model.train()(_batch(number)).sum().backward()
            assert step.lost == fails
            if number != 3:
                each.optimizer.step()
                average.update()
            each.optimizer.zero_grad()
    assert all(map(torch.equal, trainer.state()[:-9], reference.state()[:-9]))


# --- what belongs behind the scope ---------------------------------------------------------------


def _scaled(trainer: Trainer) -> None:
    scaler = torch.amp.GradScaler(current_device().type)
    scaler.scale(trainer.model(_batch(1)).sum()).backward()
    scaler.step(trainer.optimizer)


def _steps_when_landed(trainer: Trainer) -> None:
    weight = trainer.model.head.weight
    hook = weight.register_post_accumulate_grad_hook(lambda _: trainer.optimizer.step())
    try:
        trainer.model(_batch(1)).sum().backward()
    finally:
        hook.remove()


BEHIND: Final[dict[str, Callable[[Trainer, EMA], object]]] = {
    r"SGD\.step\(\) was called": lambda trainer, _: trainer.optimizer.step(),
    r"SGD\.step\(\) was called in": lambda trainer, _: _steps_when_landed(trainer),
    r"GradScaler.unscale_\(\) or step\(\) was called": lambda trainer, _: _scaled(trainer),
    r"EMA\.update\(\) was called": lambda _, average: average.update(),
    r"load_state_dict\(\) was called": lambda trainer, _: trainer.model.load_state_dict(
        trainer.model.state_dict()
    ),
    "average_parameters was called": lambda trainer, _: average_parameters(trainer.model),
    "full_state_dict was called": lambda trainer, _: full_state_dict(trainer.model),
    "summon_full_params was called": lambda trainer, _: summon_full_params(
        trainer.model
    ).__enter__(),
}


@pytest.mark.parametrize("name", ["shards", "replicate"])
@spmd(ranks=2)
def test_what_writes_is_refused_in_the_scope_on_all_ranks(name: str) -> None:
    trainer, reference = Trainer(ANNOTATIONS[name]), Trainer(ANNOTATIONS[name])
    average = EMA(trainer.model, decay=0.9)
    for number, (said, write) in enumerate(BEHIND.items()):
        scope = together(trainer.model)
        with pytest.raises(PhaseError, match=f"together: {said}") as raised, scope:
            write(trainer, average)
        assert not any("timeout" in note for note in getattr(raised.value, "__notes__", ()))
        trainer.optimizer.zero_grad()
        assert trainer.step(number) == reference.step(number) == ""
    # without buffers: an error of all ranks in a step that cannot be followed leaves them
    both = [all_full([*each.model.parameters()]) for each in (trainer, reference)]
    assert all(map(torch.equal, *both))


@spmd(ranks=2)
def test_writes_in_place_are_refused_where_a_lost_step_has_made_them_on_some_ranks_only() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])

    def step(where: str) -> None:
        with together(trainer.model) as scope:
            trainer.model(_batch(1)).sum().backward()
            if where == "before" and dist.get_rank() == 1:
                _fail()
            with torch.no_grad():
                trainer.model.head.weight.clamp_(max=0.1)
            if where == "behind" and dist.get_rank() == 1:
                _fail()
        trainer.optimizer.zero_grad()
        assert scope.lost == (where == "behind")

    for where in ("nowhere", "nowhere", "nowhere", "behind", "nowhere"):  # as CLIP's temperature
        step(where)
    with pytest.raises(PhaseError, match=r"'head.weight' of unit '.*' was written to in the scope"):
        step("before")


@spmd(ranks=2)
def test_where_one_rank_raises_and_the_others_step_in_the_scope_all_raise() -> None:
    trainer = Trainer(ANNOTATIONS["replicate"])
    for number in range(3):
        trainer.step(number)
    before = trainer.state()
    kind = MemoryError if dist.get_rank() == 0 else PhaseError

    def step() -> None:
        with together(trainer.model):
            trainer.model(_batch(4)).sum().backward()
            if dist.get_rank() == 0:
                _fail()
            trainer.optimizer.step()

    with pytest.raises(kind):
        step()
    assert all(map(torch.equal, before, trainer.state()))


@spmd(ranks=2)
def test_optimizers_of_other_tensors_may_step_in_the_scope() -> None:
    trainer = Trainer(ANNOTATIONS["shards"])
    prompt = torch.zeros(WIDTH, requires_grad=True)
    inner = torch.optim.SGD([prompt], lr=1.0)
    with together(trainer.model) as step:
        prompt.square().sum().backward()
        inner.step()
        trainer.model(_batch(0)).sum().backward()
    assert not step.lost


@pytest.mark.parametrize("name", ["shards", "replicate"])
@spmd(ranks=2)
def test_a_step_that_calls_reduce_gradients_is_followed(name: str) -> None:
    trainer = Trainer(ANNOTATIONS[name])
    for number in range(5):
        with together(trainer.model) as step:
            with no_sync(trainer.model):
                for micro_batch in range(2):
                    trainer.model(_batch(2 * number + micro_batch)).sum().backward()
                    if number == 3 and micro_batch == 0 and dist.get_rank() == 1:
                        _fail()
            reduce_gradients(trainer.model)
        assert step.lost == (number == 3)
        trainer.optimizer.zero_grad()


@pytest.mark.parametrize("name", ["kept", "resharded"])
@spmd(ranks=2)
def test_what_unshard_has_gathered_goes_with_a_lost_step(name: str) -> None:
    trainer = Trainer(ANNOTATIONS[name])
    for number in range(6):
        with together(trainer.model) as step:
            if number == 3 and dist.get_rank() == 1:
                _fail()
            unshard(trainer.model)
            if number == 4 and dist.get_rank() == 0:
                _fail()
            trainer.model(_batch(number)).sum().backward()
            if number == 5:
                unshard(trainer.model)
        assert step.lost == (number in (3, 4))
        trainer.optimizer.zero_grad()


@spmd(ranks=2)
def test_the_innermost_unit_is_named_and_not_one_whose_error_was_caught() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(self.outer(x))
            except MemoryError:
                raise ValueError("caught before") from None

    model = fully_shard(Around().to(current_device()), policy={nn.Linear})
    fails = lambda *_: _fail() if number == 3 and dist.get_rank() == 1 else None  # noqa: E731
    model.inner.register_forward_pre_hook(fails)
    for number in range(4):
        with together(model) as step:
            model(_batch(number)).sum().backward()
        model.zero_grad()
    assert step.why == "rank 1: ValueError in the forward of unit '(root)': caught before"


# --- a good step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shards", "replicate"])
@spmd(ranks=2)
def test_nothing_but_the_vote_is_sent_in_a_good_step(name: str) -> None:
    texts: dict[bool, list[str]] = {True: [], False: []}
    trainer = Trainer(ANNOTATIONS[name])
    for number in range(3):
        trainer.step(number)
    end = observe_launches(launched=lambda comm, launch, *_: texts[True].append(launch.text))
    trainer.step(3)
    end()
    end = observe_launches(launched=lambda comm, launch, *_: texts[False].append(launch.text))
    trainer.model(_batch(0)).square().mean().backward()
    clip_grad_norm_(trainer.model.parameters(), 1.0)
    end()
    assert texts[True] == [*texts[False], "vote on the step"]
