"""Communication hooks that are refused, and those that fail: no rank waits, and the next step is as good as any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from composable import no_sync, register_comm_hook, replicate
from composable.errors import CommHookError, CommunicationError
from tests.helpers.compare import full_gradients
from tests.helpers.hooked_models import fail
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device

_CAP: Final = 100 / (1 << 20)  # bytes: several buckets


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(current_device())


def _loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(3, 4).to(current_device())).square().mean()  # type: ignore[no-any-return]


def _in_backward(model: nn.Module) -> str:
    told = []
    output = model(torch.ones(1, 4, device=current_device()))
    output.register_hook(lambda _: told.append(refusal(lambda: register_comm_hook(model, noop_hook))))
    output.sum().backward()
    return told[0]


def _refusals(which: str) -> str:
    model = replicate(_model())
    x = torch.ones(1, 4, device=current_device())

    def twice() -> None:
        register_comm_hook(model, noop_hook)
        register_comm_hook(model, allreduce_hook)

    def before_backward() -> None:
        model(x)
        register_comm_hook(model, noop_hook)

    def in_a_window() -> None:
        with no_sync(model):
            model(x).sum().backward()
        register_comm_hook(model, noop_hook)

    def sparse() -> None:
        table = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1)).to(current_device())
        register_comm_hook(replicate(table), noop_hook)

    def removed_in_a_window() -> None:
        handle = register_comm_hook(model, noop_hook)
        with no_sync(model):
            model(x).sum().backward()
        handle.remove()

    if which == "in backward":
        return _in_backward(model)
    acts: dict[str, Callable[[], Any]] = {
        "not annotated": lambda: register_comm_hook(_model(), noop_hook),
        "between annotated ones": lambda: register_comm_hook(nn.Sequential(model), noop_hook),
        "state first": lambda: register_comm_hook(model, {}, noop_hook),  # type: ignore[arg-type]
        "one argument": lambda: register_comm_hook(model, lambda bucket: bucket),  # type: ignore[arg-type,misc]
        "unknown stage": lambda: register_comm_hook(model, noop_hook, stage="all_gather"),
        "stage of shards": lambda: register_comm_hook(model, noop_hook, stage="reduce_scatter"),
        "twice": twice,
        "before backward": before_backward,
        "in a window": in_a_window,
        "sparse": sparse,
        "removed in a window": removed_in_a_window,
    }
    return refusal(acts[which])


_TEXTS: Final = {
    "not annotated": "NotAnnotatedError: register_comm_hook: Sequential is not annotated; call replicate(module) or "
    "fully_shard(module) first. Of units without a module around them, each takes a hook of its own",
    "between annotated ones": "NotAnnotatedError: register_comm_hook: Sequential is not annotated; call replicate(module) or "
    "fully_shard(module) first. Of units without a module around them, each takes a hook of its own",
    "state first": "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and dict cannot be called. "
    "It stands before its state: register_comm_hook(module, hook, state)",
    "one argument": "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and <lambda> takes "
    "(bucket). Bind other arguments with functools.partial",
    "unknown stage": "AnnotationError: register_comm_hook: stage must be 'all_reduce' or None, got 'all_gather'",
    "stage of shards": "AnnotationError: register_comm_hook: replicated gradients are reduced in one stage, 'all_reduce'; "
    "leave stage= out",
    "twice": "AlreadyAnnotatedError: register_comm_hook: unit '(root)' has the communication hook 'noop_hook' already. Remove "
    "it first, by the handle that registering it returned",
    "before backward": "PhaseError: register_comm_hook: unit '(root)' is between a forward and its backward; what is not "
    "trained on belongs under torch.no_grad(). Do it between two steps",
    "in a window": "PhaseError: register_comm_hook: unit '(root)' is inside of no_sync, or has accumulated gradients, which "
    "would be reduced in another way than they were made for. Do it between two steps",
    "in backward": "PhaseError: register_comm_hook: unit '(root)' is inside of a backward. Do it between two steps",
    "sparse": "AnnotationError: register_comm_hook: the gradient of parameter '0.weight' of unit '(root)' is sparse, and hooks "
    "take dense ones. Make its embedding with sparse=False, or leave it to a unit without a hook",
    "removed in a window": "PhaseError: remove a communication hook: unit '(root)' is inside of no_sync, or has accumulated "
    "gradients, which would be reduced in another way than they were made for. Do it between two steps",
}


@pytest.mark.parametrize("which", [pytest.param(n, marks=pytest.mark.sparse) if n == "sparse" else n for n in _TEXTS])
def test_what_cannot_be_is_refused_by_name(pool: Pool, which: str) -> None:
    assert same_on_all(pool.run(2, _refusals, which)) == _TEXTS[which]


def _on_one_rank(what: str) -> str:
    model, rank = replicate(_model()), dist.get_rank()
    hook: Any = noop_hook if rank == 0 else None if what == "refused" else allreduce_hook
    text = refusal(lambda: register_comm_hook(model, hook))
    register_comm_hook(model, allreduce_hook)
    _loss(model, 0).backward()
    return text


def test_what_one_rank_refuses_no_rank_registers(pool: Pool) -> None:
    first, second = pool.run(2, _on_one_rank, "refused")
    assert first.startswith("RanksDisagreeError: register_comm_hook: rank 1 refuses: register_comm_hook: a hook is called as")
    assert second.startswith("AnnotationError: ")
    first, _ = pool.run(2, _on_one_rank, "another")
    assert first == (
        "RanksDisagreeError: register_comm_hook: rank 1 registers allreduce_hook, and rank 0 registers noop_hook; no rank "
        "registers a hook. All ranks register the same hooks, in the same order"
    )


# --- hooks that fail ------------------------------------------------------------------------------------------------------


class _Fails:
    """Fails at the second bucket of the first backward, on all ranks."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._calls = 0

    def __call__(self, group: dist.ProcessGroup, bucket: Any) -> Any:
        self._calls += 1
        if self._calls != 2:
            return allreduce_hook(group, bucket)
        if self._how == "raises":
            raise MemoryError("as planned")
        if self._how == "raises afterwards":
            return allreduce_hook(group, bucket).then(fail)
        return None if self._how == "nothing" else bucket.buffer()[1:]


def _fails_and_goes_on(how: str) -> str:
    models = [replicate(_model(), bucket_cap_mb=_CAP) for _ in range(2)]
    register_comm_hook(models[0], allreduce_hook)
    register_comm_hook(models[1], allreduce_hook if how == "elsewhere" else _Fails(how))
    before = {name: parameter.detach().clone() for name, parameter in models[1].named_parameters()}
    said = ""
    if how == "elsewhere":
        loss = _loss(models[1], 0)
        models[1][2].weight.register_hook(fail)  # type: ignore[union-attr]
    try:
        (_loss(models[1], 0) if how != "elsewhere" else loss).backward()
    except (MemoryError, CommHookError, CommunicationError) as error:
        said = type(error).__name__
    if how == "elsewhere":
        models[1][2].weight._backward_hooks.clear()
    for name, parameter in models[1].named_parameters():
        assert torch.equal(parameter, before[name]), name
    for step in range(1, 4):
        for model in models:
            model.zero_grad()
            _loss(model, step).backward()
        expected, actual = (full_gradients(model) for model in models)
        for name, gradient in expected.items():
            assert torch.equal(gradient, actual[name]), f"step {step}: {name}"  # type: ignore[arg-type]
    return said


_OUTCOMES: Final = {
    "raises": "MemoryError",
    "raises afterwards": "CommunicationError",
    "wrong size": "CommHookError",
    "nothing": "CommHookError",
    "elsewhere": "MemoryError",
}


@pytest.mark.parametrize("how", _OUTCOMES)
def test_after_a_hook_that_failed_on_all_ranks_the_next_step_works(pool: Pool, how: str) -> None:
    assert pool.run(3, _fails_and_goes_on, how, device="cpu") == [_OUTCOMES[how]] * 3
