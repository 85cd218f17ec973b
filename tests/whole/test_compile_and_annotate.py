"""What torch.compile made can be annotated, before or after it ran; what cannot work is refused and leaves no harm."""

from __future__ import annotations

import gc

import pytest
import torch

from composable import (
    describe,
    fully_shard,
    register_forward_method,
    registry,
    remove,
)
from composable.errors import AlreadyAnnotatedError, AnnotationError, NotAnnotatedError
from tests.helpers.compare import (
    full_gradients,
    full_parameters,
)
from tests.helpers.compiled import (
    CASE,
    SCHEMES,
    Block,
    assert_trains_as_one_process,
    each_block,
    fresh_compiler,
    ours_compiled,
    wrap_each_block,
)
from tests.helpers.world import Pool, current_device, spmd

# --- annotation of what is compiled -----------------------------------------------------------------------------------


@spmd(ranks=2)
def test_what_torch_compile_returned_can_be_annotated_in_place_of_the_module() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        assert fully_shard(called, policy={Block}) is called
        assert fully_shard.state(called) is fully_shard.state(model) is not None
        assert list(registry(model)) == ["fully_shard"]
        assert [row.unit for row in describe(called).rows] == [row.unit for row in describe(model).rows]
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


def _annotate_late(scheme: str) -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        called = torch.compile(model, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        called(batch).sum().backward()
        model.zero_grad()
        gc.collect()
        SCHEMES[scheme](model)
        assert assert_trains_as_one_process(model, called) > 1, "the graph of the whole model is used no more"


@pytest.mark.parametrize("scheme", ["fully_shard", "replicate and checkpoint"])
def test_a_model_that_ran_compiled_can_be_annotated(pool: Pool, scheme: str) -> None:
    """Graphs do not notice hooks that come later: those of a replicated or checkpointed module would be left out."""
    pool.run(2, _annotate_late, scheme)


# --- what cannot work -------------------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_one_graph_for_the_whole_model_is_refused_with_advice_and_leaves_the_model_usable() -> None:
    with fresh_compiler():
        model = CASE.model(0, 0, current_device())
        fully_shard(model, policy={Block})
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        (batch,) = CASE.inputs(0, 0, 0, current_device())
        with pytest.raises(torch._dynamo.exc.Unsupported, match="composable gathers parameters") as caught:
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


def test_annotating_resets_no_compiler_that_has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers import Dynamo. To reset it imports inductor, which takes seconds, and warns on some versions."""
    with fresh_compiler():
        monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("reset"))
        fully_shard(torch.nn.Linear(2, 2))
        monkeypatch.undo()
