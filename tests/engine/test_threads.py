"""A step is one thread's: what another thread begins meanwhile is refused, and spoils nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable import fully_shard, replicate
from composable.errors import HooksRemovedError, PhaseError
from tests.helpers.compare import all_full
from tests.helpers.world import TIMEOUT, current_device, spmd


def _model(verb: Callable[..., Any]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(current_device())
    if verb is fully_shard:
        verb(model, policy={nn.Linear})
    else:
        verb(model)
    return model


@contextmanager
def _stopped(call: Callable[[], Any], register: Callable[..., Any]) -> Iterator[list[Any]]:
    """Another thread stays in `call`, where a hook that `register` takes is called."""
    here, goes_on, results = Event(), Event(), list[Any]()

    def stop(*_: object) -> None:
        here.set()
        assert goes_on.wait(TIMEOUT)

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    handle, thread = register(stop), Thread(target=run, name="first")
    thread.start()
    try:
        assert here.wait(TIMEOUT)
        yield results
    finally:
        handle.remove()
        goes_on.set()
        thread.join(TIMEOUT)


@pytest.mark.parametrize("verb", [fully_shard, replicate], ids=["fully_shard", "replicate"])
@spmd(ranks=[1, 2])
def test_what_a_second_thread_begins_is_refused_and_the_first_goes_on(
    verb: Callable[..., Any],
) -> None:
    model, x = _model(verb), torch.ones(2, 4).to(current_device())
    expected = model(x).detach()
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    pattern = "came to unit '.*' while thread 'first' is in a forward or backward of it"
    with _stopped(lambda: model(x), model[2].register_forward_pre_hook) as results:
        with pytest.raises(PhaseError, match=pattern), torch.no_grad():
            model(x)
        if verb is fully_shard:
            with pytest.raises(PhaseError, match=pattern):
                model[0](x)
    assert torch.equal(results[0], expected)
    results[0].sum().backward()
    model.zero_grad()
    y = model(x)
    with _stopped(y.sum().backward, y.register_hook):
        pass  # a backward by itself, in another thread
    model.zero_grad()
    y = model(x)

    def during(register: Callable[..., Any]) -> None:
        with _stopped(y.sum().backward, register) as results:
            if current_device().type == "cpu":
                with pytest.raises(PhaseError, match=pattern):
                    model(x)
        assert results == [None]

    inner: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda module, args, output: inner.append(output))
    y = model(x)
    handle.remove()
    during(inner[0].register_hook)
    found = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, all_full(found), all_full(grads)))


@spmd(ranks=1)
def test_a_forward_that_ended_in_a_thread_that_was_interrupted_is_reset() -> None:
    model, x = _model(fully_shard), torch.ones(2, 4).to(current_device())
    expected = model(x).detach()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            model(x)

    with model[2].register_forward_pre_hook(interrupt):
        thread = Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(model(x), expected)


@spmd(ranks=1)
def test_a_forward_that_was_refused_before_it_began_in_a_thread_leaves_the_model_free() -> None:
    model, x = _model(fully_shard), torch.ones(2, 4).to(current_device())
    expected = model(x).detach()
    hooks = dict(model[0]._forward_pre_hooks)
    model[0]._forward_pre_hooks.clear()

    def run() -> None:
        with pytest.raises(HooksRemovedError):
            model(x)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    model[0]._forward_pre_hooks.update(hooks)
    assert torch.equal(model(x), expected)
