"""torch.compile before and after annotation: the same training, graphs that are made once, nothing of ours in them."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import composable
from composable import (
    checkpoint,
    clip_grad_norm_,
    compilation,
    describe,
    fully_shard,
    register_forward_method,
    registry,
    remove,
    replicate,
)
from composable.errors import AlreadyAnnotatedError, AnnotationError, NotAnnotatedError, ShardedParameterError
from tests.helpers.battery import Case
from tests.helpers.battery.case import mean_square, rows
from tests.helpers.compare import (
    differences_in_training,
    distributed_training,
    full_gradients,
    full_parameters,
    joined_training,
)
from tests.helpers.world import Pool, current_device, spmd


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(self.norm(x))

    def twice(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return 2 * hidden


class Model(nn.Module):
    """Two units in a row, and parameters of the root before and behind them."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.first = Block(width)
        self.second = Block(width)
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        x = self.first(x)
        x = self.second(x.sin())
        out: Tensor = self.head(x)
        return out


CASE: Final = Case("two blocks", Model, rows(5, 12), mean_square, (Block,))
STEPS: Final = 3
ARMED_FROM: Final = 2  # steps after which nothing may be compiled any more


# --- how to annotate --------------------------------------------------------------------------------------------------


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _shard(model: nn.Module) -> None:
    fully_shard(model, policy={Block})


def _shard_and_keep(model: nn.Module) -> None:
    fully_shard(model, policy={Block}, reshard_after_forward=False)


def _shard_and_checkpoint(model: nn.Module) -> None:
    checkpoint(model, policy={Block})
    fully_shard(model, policy={Block})


def _replicate_and_checkpoint(model: nn.Module) -> None:
    replicate(model, policy={Block})
    checkpoint(model, policy={Block})


def _replicate_around_shards(model: nn.Module) -> None:
    for block in _blocks(model):
        fully_shard(block)
    replicate(model)


SCHEMES: Final[dict[str, Callable[[nn.Module], None]]] = {
    "fully_shard": _shard,
    "fully_shard without resharding": _shard_and_keep,
    "fully_shard and checkpoint": _shard_and_checkpoint,
    "replicate and checkpoint": _replicate_and_checkpoint,
    "replicate around fully_shard": _replicate_around_shards,
}

# --- how to compile ---------------------------------------------------------------------------------------------------

Compiler = Callable[..., nn.Module]  # gets the model and torch.compile's options; returns what to call


def _each_block(model: nn.Module, **options: Any) -> nn.Module:
    for block in _blocks(model):
        block.compile(fullgraph=True, **options)
    return model


def _wrap_each_block(model: nn.Module, **options: Any) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, Block):
            setattr(model, name, torch.compile(child, fullgraph=True, **options))
    return model


def _in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def _wrap(model: nn.Module, **options: Any) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, **options)
    return wrapped


COMPILERS: Final[dict[str, Compiler]] = {
    "each block": _each_block,
    "each block, wrapped": _wrap_each_block,
    "the model": _wrap,
    "the model, in place": _in_place,
}


# --- what is seen of the compiler -------------------------------------------------------------------------------------


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, nor left behind; inductor starts no processes of its own."""
    with torch._dynamo.config.patch(error_on_recompile=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\..*")  # the compiler's, about what it does itself
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch._inductor.config.compile_threads = 1
        torch._inductor.config.cpp_cache_precompile_headers = False  # takes longer than these graphs
        try:
            yield
        finally:
            torch.compiler.reset()


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _of_ours_compiled() -> list[str]:
    """Functions of the library that Dynamo was asked about."""
    here = str(Path(composable.__file__).parent)
    seen = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    return [code.co_qualname for code in seen if code is not None and code.co_filename.startswith(here)]


def _assert_trains_as_one_process(model: nn.Module, called: nn.Module) -> int:
    """Train the annotated `model` by calling `called`; returns the number of graphs."""
    losses = 0
    graphs = []

    def loss(_: nn.Module, *inputs: Tensor) -> Tensor:
        nonlocal losses
        torch._dynamo.config.error_on_recompile = losses >= ARMED_FROM
        losses += 1
        graphs.append(_graphs())
        return mean_square(called, *inputs)

    seen = distributed_training(replace(CASE, loss=loss), model, STEPS, seed=0)
    for value in seen.losses:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    expected = joined_training(CASE, dist.get_world_size(), STEPS, seed=0)
    seen.gradients = [_plain_names(step) for step in seen.gradients]
    seen.parameters = _plain_names(seen.parameters)
    found = differences_in_training(expected, seen)
    assert not found, "\n  ".join(found[:12])
    assert graphs[ARMED_FROM] == _graphs(), "something was compiled after the second step"
    assert _of_ours_compiled() == []
    return _graphs()


def _plain_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names without torch.compile's wrappers around modules inside the model."""
    return {name.replace("._orig_mod", ""): tensor for name, tensor in tensors.items()}


# --- parity -----------------------------------------------------------------------------------------------------------


def _train(scheme: str, compiler: str, order: str, backend: str) -> None:
    with _fresh_compiler():
        model = CASE.model(0, dist.get_rank(), current_device())
        if order == "before":
            called = COMPILERS[compiler](model, backend=backend)
            SCHEMES[scheme](model)
        else:
            SCHEMES[scheme](model)
            called = COMPILERS[compiler](model, backend=backend)
        graphs = _assert_trains_as_one_process(model, called)
        if "block" in compiler:
            assert graphs == 1, "blocks of one class share their graph"
        else:
            assert graphs == 4, "one graph before, between and behind the units, and one that the units share"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("compiler", "order"), [("each block", "before"), ("each block", "after"), ("the model", "after")])
def test_compiled_models_train_as_one_process_and_compile_nothing_after_the_second_step(
    pool: Pool, scheme: str, compiler: str, order: str
) -> None:
    pool.run(2, _train, scheme, compiler, order, "aot_eager")


@pytest.mark.parametrize(
    ("compiler", "order"),
    [
        ("each block, wrapped", "before"),
        ("the model", "before"),
        ("the model, in place", "after"),
    ],
)
def test_every_way_to_compile_works_before_and_after_annotation(pool: Pool, compiler: str, order: str) -> None:
    pool.run(2, _train, "fully_shard and checkpoint", compiler, order, "aot_eager")


_COMPILER: Final = shutil.which(os.environ.get("CXX", "g++"))
_HEADERS: Final = Path(sysconfig.get_paths()["include"]) / "Python.h"


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
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        sizes = [parameter.numel() for parameter in model.parameters()]
        fully_shard(model, policy={Block})
        _each_block(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, dist.get_rank(), current_device())
        loss = model(batch).square().mean()
        saved = _saved_by_compiled_nodes(loss)
        assert any(tensor.numel() in sizes for tensor in saved), "parameters are among what is saved, or nothing is shown here"
        left = [tensor.shape for tensor in saved if tensor.numel() in sizes and tensor.untyped_storage().nbytes()]
        # The root keeps its parameters until the outermost forward is done; blocks have given theirs back.
        assert left == []
        del saved
        loss.backward()


# --- what is traced ---------------------------------------------------------------------------------------------------


def _step_in_one_function(scheme: str) -> None:
    with _fresh_compiler():
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
        assert _of_ours_compiled() == []

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
    pool.run(2, _step_in_one_function, scheme)


def test_importing_the_library_does_not_import_dynamo() -> None:
    seen = "import sys, composable; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    environment = {**os.environ, "PYTHONPATH": str(Path(composable.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("can_mark", [True, False])
def test_a_marked_function_is_never_compiled(monkeypatch: pytest.MonkeyPatch, can_mark: bool) -> None:
    """Also by a torch that has no marks."""
    monkeypatch.setattr(compilation, "_CAN_MARK", can_mark)
    namespace: dict[str, Any] = {}
    exec("def double(x): return inner(x) * 2\ndef inner(x): return x + 1", namespace)
    double = compilation.untraced(namespace["double"])
    with _fresh_compiler():
        compiled = torch.compile(lambda x: double(x) - 1, backend="eager")
        assert compiled(torch.ones(())) == 3
        asked = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
        assert namespace["double"].__code__ not in asked
        assert namespace["inner"].__code__ not in asked


# --- annotation of what is compiled -----------------------------------------------------------------------------------


@spmd(ranks=2)
def test_what_torch_compile_returned_can_be_annotated_in_place_of_the_module() -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        assert fully_shard(called, policy={Block}) is called
        assert fully_shard.state(called) is fully_shard.state(model) is not None
        assert list(registry(model)) == ["fully_shard"]
        assert [row.unit for row in describe(called).rows] == [row.unit for row in describe(model).rows]
        with pytest.raises(AlreadyAnnotatedError):
            fully_shard(called)
        _assert_trains_as_one_process(model, called)
        assert remove(called, fully_shard) is called
        assert fully_shard.state(model) is None
        with pytest.raises(NotAnnotatedError):
            remove(called, fully_shard)


@spmd(ranks=2)
def test_compiled_blocks_can_be_annotated_as_one_unit_but_not_twice() -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        _wrap_each_block(model, backend="aot_eager")
        first, second = model.first, model.second
        with pytest.raises(AnnotationError, match="twice in its list of modules"):
            fully_shard([first, first._orig_mod])
        blocks = [first, second]
        assert fully_shard(blocks) is blocks
        fully_shard(model)
        assert _assert_trains_as_one_process(model, model) == 1


@spmd(ranks=2)
def test_methods_of_a_compiled_model_can_be_registered() -> None:
    with _fresh_compiler():
        block = CASE.model(0, 0, current_device()).first
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        expected = block.twice(batch)
        called = torch.compile(block, backend="aot_eager")
        fully_shard(called)
        register_forward_method(called, "twice")
        torch.testing.assert_close(called.twice(batch), expected)
        compiled = torch.compile(lambda x: called.twice(x) + 1, backend="aot_eager")
        torch.testing.assert_close(compiled(batch), expected + 1)
        assert _of_ours_compiled() == []


def _annotate_late(scheme: str) -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        called(batch).sum().backward()
        model.zero_grad()
        gc.collect()
        SCHEMES[scheme](model)
        assert _assert_trains_as_one_process(model, called) > 1, "the graph of the whole model is used no more"


@pytest.mark.parametrize("scheme", ["fully_shard", "replicate and checkpoint"])
def test_a_model_that_ran_compiled_can_be_annotated(pool: Pool, scheme: str) -> None:
    """Graphs do not notice hooks that come later: those of a replicated or checkpointed module would be left out."""
    pool.run(2, _annotate_late, scheme)


# --- what cannot work -------------------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_one_graph_for_the_whole_model_is_refused_with_advice_and_leaves_the_model_usable() -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with pytest.raises(torch._dynamo.exc.Unsupported, match="composable gathers parameters") as caught:
            called(batch)
        assert "for block in model.blocks: block.compile(fullgraph=True)" in str(caught.value)
        _assert_trains_as_one_process(model, _each_block(model, backend="aot_eager"))


@spmd(ranks=2)
def test_compiled_code_that_uses_sharded_parameters_outside_of_a_forward_gets_the_usual_error() -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        compiled = torch.compile(lambda x: model.first.up(x) + 1, backend="aot_eager")
        with pytest.raises(ShardedParameterError, match=r"parameter 'up.weight' of unit 'first' is sharded"):
            compiled(batch)


@spmd(ranks=2)
def test_a_compiled_forward_that_raises_leaves_the_model_usable() -> None:
    with _fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        called = torch.compile(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with pytest.raises(Exception, match=r"12|mat1"):
            called(batch[:, :-1])
        _assert_trains_as_one_process(model, called)
        assert full_gradients(model).keys() == full_parameters(model).keys()
