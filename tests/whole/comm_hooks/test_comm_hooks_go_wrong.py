"""Communication hooks that are refused, and those that fail: no rank waits, and the next step is as
good as any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks as hooks_of_fsdp1
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from composable import fully_shard, no_sync, register_comm_hook, replicate
from composable.errors import CommHookError, CommunicationError
from tests.helpers.compare import full
from tests.helpers.hooked_models import (
    BOTH,
    KINDS,
    Fails,
    assert_same,
    fail,
    loss_of,
    mesh_of,
    model_of,
)
from tests.helpers.refusals import refusal, same_on_all
from tests.helpers.world import Pool, current_device


def _in_backward(model: nn.Module) -> str:
    told = []
    output = model(torch.ones(1, 6, device=current_device()))
    output.register_hook(
        lambda _: told.append(refusal(lambda: register_comm_hook(model, noop_hook)))
    )
    output.sum().backward()
    return told[0]


def _refusals(which: str) -> str:
    model = replicate(model_of())
    x = torch.ones(1, 6, device=current_device())

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
        "not annotated": lambda: register_comm_hook(nn.Sequential(), noop_hook),
        "between annotated ones": lambda: register_comm_hook(nn.Sequential(model), noop_hook),
        "annotated apart": lambda: register_comm_hook([model, replicate(model_of())], noop_hook),
        "state first": lambda: register_comm_hook(model, {}, noop_hook),  # type: ignore[arg-type]
        "one argument": lambda: register_comm_hook(model, lambda bucket: bucket),  # type: ignore[arg-type,misc]
        "of FSDP1": lambda: register_comm_hook(model, hooks_of_fsdp1.bf16_compress_hook),
        "of FSDP1, bound": lambda: register_comm_hook(
            fully_shard(model_of()), partial(hooks_of_fsdp1.reduce_scatter_hook, output=x)
        ),
        "unknown stage": lambda: register_comm_hook(model, noop_hook, stage="all_gather"),
        "stage of shards": lambda: register_comm_hook(model, noop_hook, stage="reduce_scatter"),
        "twice": twice,
        "before backward": before_backward,
        "in a window": in_a_window,
        "sparse": sparse,
        "removed in a window": removed_in_a_window,
    }
    return refusal(acts[which])


_IN_A_STEP: Final = (
    "PhaseError: register_comm_hook: unit '(root)' is in the middle of a step: in a forward or"
    " backward, between them, or in no_sync, with accumulated gradients. Do it between two steps;"
    " what is not trained on belongs under torch.no_grad()"
)
_OF_FSDP1: Final = (
    "AnnotationError: register_comm_hook: torch.distributed.algorithms._comm_hooks.default_hooks.{}"
    " is made for FSDP1, which calls it with a tensor and not with a bucket. Use the hooks of"
    " torch.distributed.algorithms.ddp_comm_hooks"
)
_TEXTS: Final = {
    "not annotated": (
        "NotAnnotatedError: register_comm_hook: Sequential is not annotated; call replicate(module)"
        " or fully_shard(module) first. Of units without a module around them, each takes a hook of"
        " its own"
    ),
    "between annotated ones": (
        "NotAnnotatedError: register_comm_hook: Sequential is not annotated; call replicate(module)"
        " or fully_shard(module) first. Of units without a module around them, each takes a hook of"
        " its own"
    ),
    "annotated apart": (
        "NotAnnotatedError: register_comm_hook takes one module, or a list that was annotated as"
        " one, and Model was not annotated together with the first one. Register a hook for"
        " each, with a state of its own"
    ),
    "state first": (
        "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and dict"
        " cannot be called. It stands before its state: register_comm_hook(module, hook, state)"
    ),
    "one argument": (
        "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and <lambda>"
        " takes (bucket). Bind other arguments with functools.partial"
    ),
    "of FSDP1": _OF_FSDP1.format("bf16_compress_hook"),
    "of FSDP1, bound": _OF_FSDP1.format("reduce_scatter_hook"),
    "unknown stage": (
        "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by all_reduce;"
        " stage= must name the one that the hook replaces, got 'all_gather'"
    ),
    "stage of shards": (
        "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by all_reduce;"
        " stage= must name the one that the hook replaces, got 'reduce_scatter'"
    ),
    "twice": (
        "AlreadyAnnotatedError: register_comm_hook: unit '(root)' has the communication hook"
        " 'noop_hook' already. Remove it first, by the handle that registering it returned"
    ),
    "before backward": _IN_A_STEP,
    "in a window": _IN_A_STEP,
    "in backward": _IN_A_STEP,
    "sparse": (
        "AnnotationError: register_comm_hook: the gradient of parameter '0.weight' of unit '(root)'"
        " is sparse, and hooks take dense ones. Make its embedding with sparse=False, or leave it"
        " to a unit without a hook"
    ),
    "removed in a window": _IN_A_STEP.replace("register_comm_hook", "remove a communication hook"),
}


@pytest.mark.parametrize(
    "which", [pytest.param(n, marks=pytest.mark.sparse) if n == "sparse" else n for n in _TEXTS]
)
def test_what_cannot_be_is_refused_by_name(pool: Pool, which: str) -> None:
    assert same_on_all(pool.run(2, _refusals, which)) == _TEXTS[which]


def _refusals_of_shards(which: str) -> str:
    model = KINDS["sharded" if which in ("one stage", "window", "twice") else "hybrid"]()
    if which == "one within":
        model = model_of()
        fully_shard(model.head)
        fully_shard(model, mesh=mesh_of())
    stage = {
        "one stage": "all_reduce",
        "one within": "reduce_scatter",
        "no such": "all_gather",
    }.get(which)
    if which == "window":
        with no_sync(model):
            return refusal(lambda: register_comm_hook(model, allreduce_hook))
    if which == "twice":
        register_comm_hook(model.head, allreduce_hook)
    if which == "a stage twice":
        stage = "all_reduce"
        for each in BOTH:
            register_comm_hook(model.head, allreduce_hook, stage=each)
    if which == "differs":
        stage = BOTH[dist.get_rank() == 3]
    return refusal(lambda: register_comm_hook(model, allreduce_hook, stage=stage))


_TEXTS_OF_SHARDS: Final = {
    "one stage": (
        "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by"
        " reduce_scatter; stage= must name the one that the hook replaces, got 'all_reduce'"
    ),
    "window": _TEXTS["in a window"],
    "twice": _TEXTS["twice"].replace("(root)", "head").replace("noop_hook", "allreduce_hook"),
    "neither": (
        "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by"
        " reduce_scatter and then by all_reduce; stage= must name the one that the hook replaces,"
        " got None"
    ),
    "no such": (
        "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by"
        " reduce_scatter and then by all_reduce; stage= must name the one that the hook replaces,"
        " got 'all_gather'"
    ),
    "one within": (
        "MeshError: register_comm_hook: unit 'head' is on another mesh than the module that the"
        " hook is for. Register a hook for each, with a state of its own"
    ),
    "a stage twice": (
        _TEXTS["twice"]
        .replace("(root)", "head")
        .replace("'noop_hook'", "'allreduce_hook' for all_reduce")
    ),
}


@pytest.mark.parametrize("which", _TEXTS_OF_SHARDS)
def test_what_cannot_be_done_to_shards_is_refused_by_name(pool: Pool, which: str) -> None:
    assert same_on_all(pool.run(4, _refusals_of_shards, which)) == _TEXTS_OF_SHARDS[which]


def test_ranks_that_name_different_stages_are_told(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(4, _refusals_of_shards, "differs")):
        other = 0 if rank == 3 else 3
        stages = ["all_reduce" if number == 3 else "reduce_scatter" for number in (other, rank)]
        assert (
            text
            == f"RanksDisagreeError: register_comm_hook: rank {other} registers allreduce_hook for"
            f" {stages[0]}, and rank {rank} registers allreduce_hook for {stages[1]}; no rank"
            " registers a hook. All ranks register the same hooks, in the same order"
        )


def _on_one_rank(what: str) -> str:
    model, rank = replicate(model_of()), dist.get_rank()
    hook: Any = noop_hook if rank == 0 else None if what == "refused" else allreduce_hook
    text = refusal(lambda: register_comm_hook(model, hook))
    register_comm_hook(model, allreduce_hook)
    loss_of(model, 0).backward()
    return text


def test_what_one_rank_refuses_no_rank_registers(pool: Pool) -> None:
    first, second = pool.run(2, _on_one_rank, "refused")
    assert first.startswith(
        "RanksDisagreeError: register_comm_hook: rank 1 refuses: register_comm_hook: a hook is"
        " called as"
    )
    assert second.startswith("AnnotationError: ")
    first, _ = pool.run(2, _on_one_rank, "another")
    assert (
        first
        == "RanksDisagreeError: register_comm_hook: rank 1 registers allreduce_hook, and rank 0"
        " registers noop_hook; no rank registers a hook. All ranks register the same hooks, in"
        " the same order"
    )


# --- hooks that fail ----------------------------------------------------------------------------


def _spoiled(model: Any) -> Tensor:
    """A loss whose backward fails outside of hooks."""

    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    with model.second.register_forward_hook(spoil):
        return loss_of(model, 0, spare=True)


def _fails_and_goes_on(how: str, kind: str, failing: str | None) -> str:
    """The second model's first backward fails; then it trains on like the first, which did not.
    Returns what it raised.
    """
    models = [KINDS[kind]() for _ in range(2)]
    for stage in BOTH if kind == "hybrid" else (None,):
        register_comm_hook(models[0], allreduce_hook, stage=stage)
        hook = Fails(how) if stage == failing and how != "elsewhere" else allreduce_hook
        register_comm_hook(models[1], hook, stage=stage)
    before = [full(parameter) for parameter in models[1].parameters()]
    loss = _spoiled(models[1]) if how == "elsewhere" else loss_of(models[1], 0, spare=True)
    said = ""
    try:
        loss.backward()
    except (MemoryError, CommHookError, CommunicationError) as error:
        said = type(error).__name__
    assert all(
        torch.equal(full(parameter), old)
        for parameter, old in zip(models[1].parameters(), before, strict=True)
    )
    for step in range(1, 4):
        for model in models:
            model.zero_grad()
            loss_of(model, step, spare=True).backward()
        assert_same(models, step)
    return said


_OUTCOMES: Final = {
    "raises": "MemoryError",
    "raises afterwards": "CommunicationError",
    "wrong size": "CommHookError",
    "returns nothing": "CommHookError",
    "elsewhere": "MemoryError",
}


@pytest.mark.parametrize(
    ("ranks", "kind", "stage"),
    [(3, "replicated", None), (3, "sharded", None), *((4, "hybrid", stage) for stage in BOTH)],
)
@pytest.mark.parametrize("how", _OUTCOMES)
def test_after_a_hook_that_failed_on_all_ranks_the_next_step_works(
    pool: Pool, how: str, ranks: int, kind: str, stage: str | None
) -> None:
    assert (
        pool.run(ranks, _fails_and_goes_on, how, kind, stage, device="cpu")
        == [_OUTCOMES[how]] * ranks
    )
