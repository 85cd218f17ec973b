"""torch.compile before and after annotation: the same training, graphs that are made once, nothing
of ours in them.

What torch.compile made can be annotated, before or after it ran; what cannot work is refused and
leaves no harm.
"""

from __future__ import annotations

import copy
import gc
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
    describe,
    fully_shard,
    register_forward_method,
    registry,
    remove,
    reshard,
    unshard,
)
from composable.errors import (
    AlreadyAnnotatedError,
    AnnotationError,
    DifferentiationError,
    NotAnnotatedError,
)
from tests.helpers.compare import full_gradients, full_parameters
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
    wrap_each_block,
)
from tests.helpers.world import Pool, current_device, spmd

# --- parity --------------------------------------------------------------------------------------


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
            assert graphs == 4, (
                "one graph before, between and behind the units, and one that the units share"
            )


_WAYS: Final = [("each block", "before"), ("each block", "after"), ("the model", "after")]
_OTHER_WAYS: Final = [
    ("each block, wrapped", "before"),
    ("the model", "before"),
    ("the model, in place", "after"),
]
_CASES: Final = [
    *((scheme, *way) for scheme in SCHEMES for way in _WAYS),
    *(("fully_shard and checkpoint", *way) for way in _OTHER_WAYS),
]


@pytest.mark.parametrize(("scheme", "compiler", "order"), _CASES)
@spmd(ranks=2)
def test_compiled_models_train_as_one_process_and_compile_nothing_after_the_second_step(
    scheme: str, compiler: str, order: str
) -> None:
    _train(scheme, compiler, order, "aot_eager")


_COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
_HEADERS: Final = Path(sysconfig.get_paths()["include"]) / "Python.h"


@pytest.mark.beyond_sim("inductor does not know the device")
@pytest.mark.skipif(
    _COMPILER is None or not _HEADERS.exists(),
    reason="inductor needs a C++ compiler and Python's headers",
)
@pytest.mark.parametrize(
    ("scheme", "compiler", "order"),
    [
        ("fully_shard and checkpoint", "the model", "after"),
        ("replicate and checkpoint", "the model", "before"),
    ],
)
def test_inductor_trains_as_one_process_too(
    pool: Pool, scheme: str, compiler: str, order: str
) -> None:
    pool.run(2, _train, scheme, compiler, order, "inductor", timeout=300)


# --- memory -------------------------------------------------------------------------------------


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
        assert any(tensor.numel() in sizes for tensor in saved), (
            "parameters are among what is saved, or nothing is shown here"
        )
        left = [
            tensor.shape
            for tensor in saved
            if tensor.numel() in sizes and tensor.untyped_storage().nbytes()
        ]
        # The root keeps its parameters until the outermost forward is done; blocks have given
        # theirs back.
        assert left == []
        del saved
        loss.backward()


# --- what is traced -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fully_shard and checkpoint", "replicate around fully_shard"])
@spmd(ranks=2)
def test_a_compiled_function_may_run_forward_and_backward(scheme: str) -> None:
    """Then Dynamo is at work while autograd calls our hooks, and is not asked about them."""
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


# It does not call what is to be called at its end: no gradient would be averaged, and nobody would
# know.
@pytest.mark.parametrize("scheme", ["fully_shard without resharding", "fully_shard"])
@spmd(ranks=2, everywhere=True)
def test_a_backward_that_compiled_autograd_runs_is_refused(scheme: str) -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        plain = copy.deepcopy(model)
        SCHEMES[scheme](model)
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with (
            torch._dynamo.compiled_autograd._enable(lambda graph: graph),
            pytest.raises(DifferentiationError, match="compiled"),
        ):
            model(batch).square().mean().backward()
        for each in (model, plain):
            each.zero_grad()
            each(batch).square().mean().backward()
        torch.testing.assert_close(
            full_gradients(model), full_gradients(plain), rtol=1e-9, atol=1e-11
        )


def test_importing_the_library_does_not_import_dynamo() -> None:
    seen = (
        "import sys, composable; print([name for name in sys.modules if"
        " name.startswith('torch._dynamo')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(composable.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", seen], capture_output=True, text=True, check=True, env=environment
    )
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


# --- annotation of what is compiled -------------------------------------------------------------


@spmd(ranks=2)
def test_what_torch_compile_returned_can_be_annotated_in_place_of_the_module() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        assert fully_shard(called, policy={Block}) is called
        assert fully_shard.state(called) is fully_shard.state(model) is not None
        assert list(registry(model)) == ["fully_shard"]
        assert [row.unit for row in describe(called).rows] == [
            row.unit for row in describe(model).rows
        ]
        with pytest.raises(AlreadyAnnotatedError):
            fully_shard(called)
        assert_trains_as_one_process(model, called)
        assert remove(called, fully_shard) is called
        assert fully_shard.state(model) is None
        with pytest.raises(NotAnnotatedError):
            remove(called, fully_shard)


@spmd(ranks=2)
def test_compiled_blocks_can_be_annotated_as_one_unit_but_not_twice() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        wrap_each_block(model, backend="aot_eager")
        first, second = model.first, model.second
        with pytest.raises(AnnotationError, match="twice in its list of modules"):
            fully_shard([first, first._orig_mod])
        blocks = [first, second]
        assert fully_shard(blocks) is blocks
        fully_shard(model)
        assert assert_trains_as_one_process(model, model) == 1


@spmd(ranks=2)
def test_methods_of_a_compiled_model_can_be_registered() -> None:
    with fresh_compiler():
        block = CASE.model(0, 0, current_device()).first
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        expected = block.twice(batch)
        called = torch.compile(block, backend="aot_eager")
        fully_shard(called)
        register_forward_method(called, "twice")
        torch.testing.assert_close(called.twice(batch), expected)
        compiled = torch.compile(lambda x: called.twice(x) + 1, backend="aot_eager")
        torch.testing.assert_close(compiled(batch), expected + 1)
        assert ours_compiled() == []


@pytest.mark.parametrize("scheme", ["fully_shard", "replicate and checkpoint"])
@spmd(ranks=2, everywhere=True)
def test_a_model_that_ran_compiled_can_be_annotated(scheme: str) -> None:
    """Graphs do not notice hooks that come later: those of a replicated or checkpointed module
    would be left out.
    """
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        called(batch).sum().backward()
        model.zero_grad()
        gc.collect()
        SCHEMES[scheme](model)
        assert assert_trains_as_one_process(model, called) > 1, (
            "the graph of the whole model is used no more"
        )


# --- what cannot work ---------------------------------------------------------------------------


@spmd(ranks=2)
def test_one_graph_for_the_whole_model_is_refused_with_advice_and_leaves_the_model_usable() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match="composable gathers parameters"
        ) as caught:
            called(batch)
        assert "for block in model.blocks: block.compile(fullgraph=True)" in str(caught.value)
        assert_trains_as_one_process(model, each_block(model, backend="aot_eager"))


@spmd(ranks=2)
def test_a_compiled_forward_that_raises_leaves_the_model_usable() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        called = torch.compile(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with pytest.raises(Exception, match=r"12|mat1"):
            called(batch[:, :-1])
        assert_trains_as_one_process(model, called)
        assert full_gradients(model).keys() == full_parameters(model).keys()


def test_annotating_resets_no_compiler_that_has_compiled_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Optimizers import Dynamo. To reset it imports inductor, which takes seconds, and warns on
    some versions.
    """
    with fresh_compiler():
        monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("reset"))
        fully_shard(torch.nn.Linear(2, 2))
        monkeypatch.undo()
