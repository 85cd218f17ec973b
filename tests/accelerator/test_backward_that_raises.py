"""What a backward that raised leaves to its caller. A thread of autograd's runs it, which drops it
a little after its caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable import fully_shard, register_comm_hook, reset
from composable.torch_private import local_of
from tests.accelerator.copies import at_rest_again
from tests.helpers.world import current_device, spmd

TRIALS = 20


class Asked(BaseException):
    """No `Exception`, as an interrupt is none."""


def _sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(current_device())
    fully_shard(model, policy={nn.Linear})
    return model


def _fails_before_the_first_unit(model: nn.Module, error: BaseException) -> Callable[[], None]:
    """A backward to call, in which the second unit's gradients are there and the first one's are
    not.
    """

    def fail(_: Tensor) -> None:
        raise error

    x = torch.ones(2, 4, device=current_device())
    handle = model[1].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)  # type: ignore[index]
    loss = model(x).sum()
    handle.remove()
    return loss.backward  # type: ignore[no-any-return]


@spmd(ranks=1)
@pytest.mark.parametrize("error", [MemoryError, Asked])
def test_state_dicts_are_those_of_parameters_at_rest_and_the_next_step_works(
    error: type[BaseException],
) -> None:
    model = _sharded()
    parameters = list(model.parameters())
    addresses = [local_of(parameter).data_ptr() for parameter in parameters]
    for _ in range(TRIALS):
        backward = _fails_before_the_first_unit(model, error())
        with pytest.raises(error):
            backward()
        assert [
            value.data_ptr() for value in map(local_of, model.state_dict().values())
        ] == addresses
        assert at_rest_again(model, parameters)
        model.zero_grad()
    model(torch.ones(2, 4, device=current_device())).sum().backward()
    expected = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected.load_state_dict(
        {name: value.to_local().cpu() for name, value in model.state_dict().items()}
    )  # type: ignore[attr-defined]
    expected(torch.ones(2, 4)).sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local().cpu(), other.grad)  # type: ignore[union-attr]


@spmd(ranks=1)
def test_parameters_come_back_where_two_threads_call_backward_and_one_of_them_raises() -> None:
    raising, other = _sharded(), _sharded()
    parameters = list(raising.parameters())
    inside, over = threading.Event(), threading.Event()

    def hold(_: Tensor) -> None:
        inside.set()
        over.wait(60)

    loss = other(torch.ones(2, 4, device=current_device())).sum() + 0 * torch.ones(
        (), requires_grad=True
    )
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
    assert at_rest_again(raising, parameters)
    assert all(parameter.grad is not None for parameter in other.parameters())


@spmd(ranks=2)
def test_a_step_is_given_up_whole_also_if_a_hook_in_place_of_a_collective_has_failed() -> None:
    model = _sharded()
    with register_comm_hook(model, None, lambda group, bucket: bucket.buffer()[1:]):
        x = torch.ones(2, 4, device=current_device(), requires_grad=True)

        def fail(_: Tensor) -> None:
            raise MemoryError

        x.register_hook(fail)  # behind the last unit; the others' gradients are in flight
        with pytest.raises(MemoryError):
            model(x).sum().backward()
        reset(model)
    loss = model(torch.ones(2, 4, device=current_device())).sum()
    loss.backward()
    bias = model[2].bias.grad
    assert isinstance(bias, DTensor)
    assert bias.full_tensor().tolist() == [2.0] * 4
