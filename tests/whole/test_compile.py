"""torch.compile before and after annotation: the same training, graphs that are made once, nothing of ours in them."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable
from composable import (
    clip_grad_norm_,
    compilation,
    fully_shard,
    reshard,
    unshard,
)
from composable.errors import DifferentiationError
from tests.helpers.compare import full_gradients
from tests.helpers.compiled import (
    ARMED_FROM,
    CASE,
    COMPILERS,
    SCHEMES,
    STEPS,
    Block,
    assert_trains_as_one_process,
    each_block,
    fresh_compiler,
    ours_compiled,
)
from tests.helpers.world import Pool, current_device, spmd

# --- parity -----------------------------------------------------------------------------------------------------------


def _train(scheme: str, compiler: str, order: str, backend: str) -> None:
    with fresh_compiler():
        model = CASE.model(0, dist.get_rank(), current_device())
        if order == "before":
            called = COMPILERS[compiler](model, backend=backend)
            SCHEMES[scheme](model)
        else:
            SCHEMES[scheme](model)
            called = COMPILERS[compiler](model, backend=backend)
        graphs = assert_trains_as_one_process(model, called)
        if "block" in compiler:
            assert graphs == 1, "blocks of one class share their graph"
        else:
            assert graphs == 4, "one graph before, between and behind the units, and one that the units share"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("compiler", "order"), [("each block", "before"), ("each block", "after"), ("the model", "after")])
def test_compiled_models_train_as_one_process_and_compile_nothing_after_the_second_step(
    pool: Pool, scheme: str, compiler: str, order: str
) -> None:
    pool.run(2, _train, scheme, compiler, order, "aot_eager", device=pool.device)


@pytest.mark.parametrize(
    ("compiler", "order"),
    [
        ("each block, wrapped", "before"),
        ("the model", "before"),
        ("the model, in place", "after"),
    ],
)
def test_every_way_to_compile_works_before_and_after_annotation(pool: Pool, compiler: str, order: str) -> None:
    pool.run(2, _train, "fully_shard and checkpoint", compiler, order, "aot_eager", device=pool.device)


_COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
_HEADERS: Final = Path(sysconfig.get_paths()["include"]) / "Python.h"


@pytest.mark.beyond_sim("inductor does not know the device")
@pytest.mark.skipif(_COMPILER is None or not _HEADERS.exists(), reason="inductor needs a C++ compiler and Python's headers")
@pytest.mark.parametrize(
    ("scheme", "compiler", "order"),
    [
        ("fully_shard", "each block", "before"),
        ("fully_shard without resharding", "each block", "after"),
        ("fully_shard and checkpoint", "the model", "after"),
        ("replicate and checkpoint", "the model", "before"),
    ],
)
def test_inductor_trains_as_one_process_too(pool: Pool, scheme: str, compiler: str, order: str) -> None:
    pool.run(2, _train, scheme, compiler, order, "inductor", timeout=300)


# --- memory -----------------------------------------------------------------------------------------------------------


def _saved_by_compiled_nodes(tensor: Tensor) -> list[Tensor]:
    """What compiled graphs keep for backward from `tensor`."""
    found: list[Tensor] = []
    waiting, seen = [tensor.grad_fn], {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        if "CompiledFunction" in node.name():
            found += [saved for saved in node.saved_tensors if saved is not None]  # type: ignore[attr-defined]
        waiting += [following for following, _ in node.next_functions]
    return found


@spmd(ranks=2)
def test_compiled_graphs_keep_no_copies_of_parameters_for_backward() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        sizes = [parameter.numel() for parameter in model.parameters()]
        fully_shard(model, policy={Block}, reshard_after_forward=True)
        each_block(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, dist.get_rank(), current_device())
        loss = model(batch).square().mean()
        unshard(model)  # of what is not there autograd shows nothing
        saved = _saved_by_compiled_nodes(loss)
        reshard(model)
        assert any(tensor.numel() in sizes for tensor in saved), "parameters are among what is saved, or nothing is shown here"
        left = [tensor.shape for tensor in saved if tensor.numel() in sizes and tensor.untyped_storage().nbytes()]
        # The root keeps its parameters until the outermost forward is done; blocks have given theirs back.
        assert left == []
        del saved
        loss.backward()


# --- what is traced ---------------------------------------------------------------------------------------------------


def _step_in_one_function(scheme: str) -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        plain = copy.deepcopy(model)
        SCHEMES[scheme](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(backend="aot_eager")
        def forward_and_backward(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return clip_grad_norm_(model.parameters(), 1e9)

        norms = []
        for step in range(STEPS):
            torch._dynamo.config.error_on_recompile = step >= ARMED_FROM
            (batch,) = CASE.inputs(0, step, 0, current_device())
            norms.append(forward_and_backward(batch))
            optimizer.step()
            optimizer.zero_grad()
        torch._dynamo.config.error_on_recompile = False
        assert ours_compiled() == []

        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step, norm in enumerate(norms):
            (batch,) = CASE.inputs(0, step, 0, current_device())
            plain(batch).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            torch.testing.assert_close(norm, expected, rtol=1e-9, atol=1e-11)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("scheme", ["fully_shard and checkpoint", "replicate around fully_shard"])
def test_a_compiled_function_may_run_forward_and_backward(pool: Pool, scheme: str) -> None:
    """Then Dynamo is at work while autograd calls our hooks, and is not asked about them."""
    pool.run(2, _step_in_one_function, scheme, device=pool.device)


def _refused_in_compiled_autograd(scheme: str, kind: type[Exception], said: str) -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        plain = copy.deepcopy(model)
        SCHEMES[scheme](model)
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with (
            torch._dynamo.compiled_autograd._enable(lambda graph: graph),
            pytest.raises(kind, match=said),
        ):
            model(batch).square().mean().backward()
        for each in (model, plain):
            each.zero_grad()
            each(batch).square().mean().backward()
        torch.testing.assert_close(full_gradients(model), full_gradients(plain), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scheme", ["fully_shard without resharding", "replicate and checkpoint"])
def test_a_backward_that_compiled_autograd_runs_is_refused(pool: Pool, scheme: str) -> None:
    """It does not call what is to be called at its end: no gradient would be averaged, and nobody would know."""
    pool.run(2, _refused_in_compiled_autograd, scheme, DifferentiationError, "compiled")


def test_a_backward_that_compiled_autograd_runs_finds_parameters_absent_before_anybody_is_called(pool: Pool) -> None:
    """It takes what all nodes have saved before it runs the first one."""
    pool.run(2, _refused_in_compiled_autograd, "fully_shard", RuntimeError, "is at version 2147483647")


def test_importing_the_library_does_not_import_dynamo() -> None:
    seen = "import sys, composable; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(composable.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"


def test_a_marked_function_is_never_compiled() -> None:
    namespace: dict[str, Any] = {}
    exec("def double(x): return inner(x) * 2\ndef inner(x): return x + 1", namespace)
    double = compilation.untraced(namespace["double"])
    with fresh_compiler():
        compiled = torch.compile(lambda x: double(x) - 1, backend="eager")
        assert compiled(torch.ones(())) == 3
        asked = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
        assert namespace["double"].__code__ not in asked
        assert namespace["inner"].__code__ not in asked
