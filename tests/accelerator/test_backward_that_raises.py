"""What a backward that raised leaves to its caller: autograd runs an accelerator's part of it in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard
from tests.helpers.world import current_device, spmd

TRIALS = 20  # in most of them the thread of autograd's once came too late


class Asked(BaseException):
    """No `Exception`, as an interrupt is none."""


def _sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(current_device())
    fully_shard(model, policy={nn.Linear})
    return model


def _fails_before_the_first_unit(model: nn.Module, error: BaseException) -> Callable[[], None]:
    """A backward to call, in which the second unit's gradients are there and the first one's are not."""

    def fail(_: Tensor) -> None:
        raise error

    x = torch.ones(2, 4, device=current_device())
    handle = model[1].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)  # type: ignore[index]
    loss = model(x).sum()
    handle.remove()
    return loss.backward  # type: ignore[no-any-return]


@spmd(ranks=1)
@pytest.mark.parametrize("error", [MemoryError, Asked])
def test_parameters_are_back_before_the_caller_sees_the_error(error: type[BaseException]) -> None:
    model = _sharded()
    parameters = list(model.parameters())
    for _ in range(TRIALS):
        backward = _fails_before_the_first_unit(model, error())
        with pytest.raises(error):
            backward()
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        model.zero_grad()
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    expected = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected.load_state_dict({name: value.to_local().cpu() for name, value in model.state_dict().items()})  # type: ignore[attr-defined]
    expected(torch.ones(2, 4)).sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local().cpu(), other.grad)  # type: ignore[union-attr]


@spmd(ranks=1)
def test_parameters_come_back_where_two_threads_call_backward_and_one_of_them_raises() -> None:
    """Whose backward a thread of autograd's runs is not known then: the other one's is left alone."""
    raising, other = _sharded(), _sharded()
    parameters = list(raising.parameters())
    inside, over = threading.Event(), threading.Event()

    def hold(_: Tensor) -> None:
        inside.set()
        over.wait(60)

    loss = other(torch.ones(2, 4, device=current_device())).sum() + 0 * torch.ones((), requires_grad=True)
    first = torch.ones((), requires_grad=True)
    held = first * 1.0  # of the host: the thread that calls this backward runs it
    held.register_hook(hold)
    thread = threading.Thread(target=(loss + held.to(current_device())).backward)
    thread.start()
    assert inside.wait(60)
    backward = _fails_before_the_first_unit(raising, MemoryError())
    with pytest.raises(MemoryError):
        backward()
    over.set()
    thread.join()
    torch.ones((), device=current_device(), requires_grad=True).square().backward()  # after those
    assert all(one is each for one, each in zip(raising.parameters(), parameters, strict=True))
    assert all(parameter.grad is not None for parameter in other.parameters())
