"""KeyboardInterrupt at a line of the library, at another one on each rank: training goes on with the right numbers, or refuses.

`python -m tests.whole.interrupted --count 500` tries more of them.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from composable.errors import PhaseError
from tests.helpers.interrupts import ON_TWO, Model, plan_of, run_seeds
from tests.helpers.world import Pool


@pytest.mark.host
@pytest.mark.parametrize("scheme", ON_TWO)
def test_training_goes_on_after_an_interrupt_as_if_the_step_had_been_left_out(pool: Pool, scheme: str) -> None:
    ranks = 2
    # docs/decisions/0018-interrupts.md tells of one before; 1011 may come in the first line of a hook, a limit that it names.
    seeds = (*range(1006, 1011), 1012)
    for rank, found in enumerate(pool.run(ranks, run_seeds, seeds, 20.0, scheme)):
        for seen in found:
            assert not seen.wrong, f"{plan_of(seen.seed, ranks, scheme)}, rank {rank}, at {seen.where}: {seen}"


def test_a_seed_stands_for_the_same_every_time() -> None:
    assert [plan_of(seed, 2) for seed in range(50)] == [plan_of(seed, 2) for seed in range(50)]


class _Penalised(nn.Module):
    """Has a backward of its own inside forward, and goes on when that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Model()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            with self.body.embed.register_forward_hook(self._spoil):
                y = self.body(x)
            y.sum().backward()
        except ValueError:
            pass
        return self.body(x)

    def _spoil(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.fails:
            output.register_hook(_fail)


def _fail(gradient: Tensor) -> None:
    raise ValueError("as planned")


def _train_past_a_failed_backward() -> tuple[list[str], float, float]:
    torch.manual_seed(0)
    model, plain = _Penalised(), _Penalised()
    plain.load_state_dict(model.state_dict())
    fully_shard(model, policy={nn.Linear, Model})
    x = torch.ones(2, 6)
    said = []
    for step in range(3):
        model.fails = step == 1
        try:
            model(x).sum().backward()
        except PhaseError as error:
            said.append(str(error))
        if step < 2:
            model.zero_grad()
    plain(x).sum().backward()
    ours, theirs = model.body.head.weight.grad, plain.body.head.weight.grad
    assert ours is not None
    assert theirs is not None
    return said, ours.full_tensor().sum().item(), theirs.sum().item()


def test_a_forward_does_not_go_on_after_a_backward_inside_it_has_raised(pool: Pool) -> None:
    for said, ours, theirs in pool.run(2, _train_past_a_failed_backward):
        assert said == [
            "unit '(root)': a backward raised, and the step went on. Other ranks may have got further in it, so what it "
            "brought is of no use. Catch the error around the whole step, call zero_grad(), and begin with a forward of the "
            "model"
        ]
        assert ours == pytest.approx(theirs)


def _interrupt_a_second_forward(clears: str) -> list[str]:
    torch.manual_seed(0)
    model = fully_shard(Model(), policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    said = []
    with model.head.register_forward_pre_hook(interrupt):
        try:
            model(torch.ones(2, 6))
        except KeyboardInterrupt:
            (model if clears == "model" else optimizer).zero_grad()
    for _ in range(2):
        try:
            model(torch.ones(2, 6)).sum().backward()
        except PhaseError as error:
            said.append(str(error))
    return said


def test_gradients_that_zero_grad_may_have_missed_where_an_interrupt_was_caught_are_told_of_once(pool: Pool) -> None:
    for said in pool.run(2, _interrupt_a_second_forward, "model"):
        assert len(said) == 1
        assert re.fullmatch(
            r"unit '.*': an interrupt ended a step, and parameter '.*' has a gradient from before\. A zero_grad\(\) of the "
            r"module that was called where the interrupt was caught did not reach it\. Call zero_grad\(\) now, on every rank, "
            r"or keep the gradient, and go on: this is said once",
            said[0],
        )
    assert pool.run(2, _interrupt_a_second_forward, "optimizer") == [[], []]
