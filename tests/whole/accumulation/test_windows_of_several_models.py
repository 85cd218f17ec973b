"""Windows of accumulation over several models in one program: adversaries, a teacher and its
student.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, no_sync, reduce_gradients, registry, replicate
from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.compare import assert_same_gradients
from tests.helpers.world import spmd


def _layers(*widths: int) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*(module for a, b in pairs for module in (nn.Linear(a, b), nn.Tanh())))


class Models(nn.Module):
    """Two models that know nothing of each other. Nobody annotates what holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _layers(6, 5, 6), _layers(6, 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))  # type: ignore[no-any-return]


CASE: Final = Case("two models", Models, rows(4, 6), mean_square, (nn.Linear,))


def both_sharded(models: Models, case: Case) -> None:
    fully_shard(models.one, policy={nn.Linear})
    fully_shard(models.other, policy={nn.Linear}, reshard_after_forward=False)


def both_replicated(models: Models, case: Case) -> None:
    replicate(models.one)
    replicate(models.other)


def one_of_each(models: Models, case: Case) -> None:
    fully_shard(models.one, policy={nn.Linear})
    replicate(models.other)


SCHEMES: Final = {
    scheme.__name__: scheme for scheme in (both_sharded, both_replicated, one_of_each)
}


def _held(*models: nn.Module, enabled: bool = True) -> AbstractContextManager[object]:
    """`no_sync` of each that is annotated."""
    scopes = ExitStack()
    for model in models:
        if enabled and registry(model):
            scopes.enter_context(no_sync(model))
    return scopes


def _end(*models: nn.Module) -> None:
    for model in models:
        if registry(model):
            reduce_gradients(model)


def adversaries_in_turns(models: Models, x: Tensor) -> None:
    """Each has a window of two; the generator's backwards go through the discriminator, whose
    gradients they spoil.
    """
    for number in range(2):
        with _held(models.other, enabled=number == 0):
            fake = models.one((number + 1) * x).detach()
            (models.other(x).square().mean() - models.other(fake).square().mean()).backward()
    models.other.requires_grad_(False)
    for number in range(2):
        with _held(models.one, enabled=number == 0):
            models.other(models.one((number + 3) * x)).square().mean().backward()
    models.other.requires_grad_(True)


def adversaries_at_once(models: Models, x: Tensor) -> None:
    """Windows that overlap: one opens inside of the other's, and ends after it."""
    with _held(models.other):
        (
            models.other(x).square().mean() - models.other(models.one(x).detach()).square().mean()
        ).backward()
        with _held(models.one):
            models.other(models.one(2 * x)).square().mean().backward()
    with _held(models.one):
        models.other(models.one(3 * x)).square().mean().backward()
    models.one(4 * x).square().mean().backward()
    _end(models.other)


def spoilt_gradients_are_cleared(models: Models, x: Tensor) -> None:
    """What a generator's window leaves in the discriminator is cleared before the discriminator's
    own.
    """
    with _held(models.one, models.other):
        models.other(models.one(x)).square().mean().backward()
    models.other.zero_grad()
    with _held(models.one):
        models.other(models.one(2 * x).detach()).square().mean().backward()
    models.one(3 * x).square().mean().backward()


def a_teacher_and_its_student(models: Models, x: Tensor) -> None:
    """The teacher runs without gradients in the student's window, as its first forward, too."""
    for number in range(3):
        batch = (number + 1) * x
        with torch.no_grad():
            wanted = models.other(batch)
        with _held(models.one, enabled=number < 2):
            (models.one(batch)[:, :3] - wanted).square().mean().backward()


def one_loss_of_both(models: Models, x: Tensor) -> None:
    """A loss of two models, held in one of them, averaged in the other one."""
    with _held(models.one):
        (models.one(x).square().mean() * models.other(x).square().mean()).backward()
    (models.one(2 * x).square().mean() + models.other(models.one(3 * x)).mean()).backward()


def an_error_in_one_leaves_the_other(models: Models, x: Tensor) -> None:
    """What one model holds outlives an exception in the other's forward, and its scope ends with
    it.
    """
    with _held(models.one):
        models.one(x).square().mean().backward()
    try:
        with _held(models.other):
            models.other(x[:, :5])
    except RuntimeError:
        pass
    models.other(2 * x).square().mean().backward()
    models.one(3 * x).square().mean().backward()


PROGRAMS: Final[dict[str, Callable[[Models, Tensor], None]]] = {
    program.__name__: program
    for program in (
        adversaries_in_turns, adversaries_at_once, spoilt_gradients_are_cleared,
        a_teacher_and_its_student, one_loss_of_both, an_error_in_one_leaves_the_other,
    )
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@spmd(ranks=[2, 4])
def test_each_model_has_the_gradients_of_its_own_windows(scheme: str) -> None:
    for name, program in PROGRAMS.items():
        try:
            assert_same_gradients(CASE, SCHEMES[scheme], program)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
