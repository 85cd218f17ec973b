"""Behaviour 39: under compiled autograd `replicate` reduces in the compiler's graph, one functional
all-reduce per gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.bucketing import bucket_all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable import (
    MixedPrecisionPolicy,
    apply_optimizer_in_backward,
    checkpoint,
    fully_shard,
    local_steps,
    no_sync,
    register_comm_hook,
    replicate,
    skipped,
)
from composable.errors import DifferentiationError, PhaseError
from composable.features import traced
from composable.features.traced import TracedReduction
from tests.helpers.battery.case import mean_square
from tests.helpers.compare import full_gradients
from tests.helpers.compiled import CASE, Block, assert_trains_as_one_process, fresh_compiler
from tests.helpers.logged import logged
from tests.helpers.world import current_device, spmd

ALL_REDUCE: Final = torch.ops._c10d_functional.all_reduce.default
Graph = torch.fx.GraphModule


class _Lookup(nn.Module):
    """Adds rows of a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True, dtype=torch.float64, device=current_device())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table(torch.arange(len(x), device=x.device))
        return x + found


class Compiler:
    """What compiles backwards. Keeps their graphs as AOTAutograd has made them, and the numbers of
    all-reduces in each.

    Args:
        merges: run torch's pass that merges all-reduces.
    """

    def __init__(self, *, merges: bool = False) -> None:
        self.graphs: list[Graph] = []
        self.inputs: list[list[Tensor]] = []
        self._merges = merges

    def __call__(self, captured: Graph) -> Callable[..., Any]:
        # fullgraph: nothing of the library may break the graph
        return torch.compile(captured, backend=aot_autograd(fw_compiler=self._keep), fullgraph=True)

    def _keep(self, graph: Graph, _: Any) -> Callable[..., Any]:
        if self._merges:
            bucket_all_reduce(graph)
            graph.graph.lint()
            graph.recompile()
        self.graphs.append(graph)
        return graph.forward

    @property
    def reduced(self) -> list[list[int]]:
        """For each graph, the number of elements of each all-reduce."""
        return [
            [n.args[0].meta["val"].numel() for n in g.graph.nodes if n.target is ALL_REDUCE]
            for g in self.graphs
        ]


def as_captured(graph: Graph) -> Graph:
    """A compiler that runs what compiled autograd has captured, without Dynamo."""
    return graph


@contextmanager
def backwards_compiled_by(compiler: Callable[[Graph], Any]) -> Iterator[None]:
    with fresh_compiler(), torch._dynamo.compiled_autograd._enable(compiler):
        yield


def _model() -> nn.Module:
    """Small, since compiled autograd takes some 20 ms for each operation."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2, bias=False)
    return nn.Sequential(*layers).to(current_device(), torch.float64)


def _batch(step: int = 0) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 4, dtype=torch.float64).to(current_device())


def _backward(model: nn.Module, step: int = 0) -> None:
    mean_square(model, _batch(step)).backward()


def _tracing_hooks(model: nn.Module) -> int:
    hooks = [
        getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()
    ]
    return sum(isinstance(getattr(each, "of_engine", None), TracedReduction) for each in hooks)


def _expected(**options: Any) -> dict[str, Tensor]:
    """Gradients of an eager `replicate`."""
    model = _model()
    replicate(model, **options)
    _backward(model)
    return full_gradients(model)


# --- parity -------------------------------------------------------------------------------------


@spmd(ranks=[1, 2])
def test_39_under_compiled_autograd_replicated_models_train_as_one_process() -> None:
    with backwards_compiled_by(Compiler()):
        model = CASE.model(0, 0, current_device())
        replicate(model, policy={Block})
        assert_trains_as_one_process(model, torch.compile(model, backend="aot_eager"))
        assert _tracing_hooks(model) == len(list(model.parameters()))


@spmd(ranks=2)
def test_39_the_configuration_of_dynamo_is_enough() -> None:
    """A compiled function runs forward and backward; compiled autograd compiles the backward with
    the same backend.
    """
    with fresh_compiler(), torch._dynamo.config.patch(compiled_autograd=True):
        model = _model()
        replicate(model)

        @torch.compile(backend="aot_eager")
        def step(x: Tensor) -> None:
            model(x).square().mean().backward()

        step(_batch())
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 1
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)


# --- the graph ----------------------------------------------------------------------------------


@spmd(ranks=2)
def test_39_the_graph_has_one_all_reduce_per_gradient() -> None:
    compiler = Compiler()
    with backwards_compiled_by(compiler):
        model = _model()
        replicate(model, policy={nn.Linear})
        model.get_parameter("2.weight").requires_grad_(False)
        _backward(model)
    expected = sorted(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    assert [sorted(each) for each in compiler.reduced] == [expected]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.11's pass reads a gradient before it is computed"
)
@spmd(ranks=2)
def test_39_the_compiler_merges_the_all_reduces() -> None:
    compiler = Compiler(merges=True)
    with backwards_compiled_by(compiler):
        model = _model()
        replicate(model)
        _backward(model)
    assert compiler.reduced == [[sum(parameter.numel() for parameter in model.parameters())]]
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)


# --- what is asked of replicate -----------------------------------------------------------------


@spmd(ranks=2)
def test_39_gradients_are_summed_on_request() -> None:
    compiler = Compiler()
    with backwards_compiled_by(compiler):
        model = _model()
        replicate(model, grad_reduce="sum")
        _backward(model)
    assert len(compiler.graphs) == 1
    torch.testing.assert_close(
        full_gradients(model), _expected(grad_reduce="sum"), rtol=1e-9, atol=1e-11
    )


@spmd(ranks=2)
def test_39_hooks_of_users_see_the_mean() -> None:
    seen: list[Tensor] = []
    with backwards_compiled_by(as_captured):
        model = _model()
        replicate(model)
        model.get_parameter("3.weight").register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.clone())
        )
        _backward(model)
    torch.testing.assert_close(seen, [_expected()["3.weight"]], rtol=1e-9, atol=1e-11)


@spmd(ranks=2)
def test_39_optimizers_in_backward_step_on_the_mean() -> None:
    with backwards_compiled_by(as_captured):
        model, eager = _model(), _model()
        for each in (model, eager):
            replicate(each)
            apply_optimizer_in_backward(torch.optim.SGD, each.parameters(), {"lr": 0.1})
        _backward(model)
    _backward(eager)
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(eager.named_parameters()), rtol=1e-9, atol=1e-11
    )


@spmd(ranks=2)
def test_39_a_compiler_leaves_optimizers_in_backward_outside_of_graphs() -> None:
    model, eager = _model(), _model()
    for each in (model, eager):
        replicate(each)
        apply_optimizer_in_backward(torch.optim.AdamW, each.parameters(), {"lr": 0.1})
    with fresh_compiler(), torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda x: model(x).square().mean().backward(), backend="eager")
        for number in range(2):
            step(_batch(number))
    for number in range(2):
        eager(_batch(number)).square().mean().backward()
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(eager.named_parameters()), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("compiled", [True, False])
@spmd(ranks=2)
def test_39_recomputation_is_part_of_the_backward(compiled: bool) -> None:
    model = _model()
    replicate(model, policy={nn.Linear})
    checkpoint(model, policy={nn.Linear})
    with logged() as lines, fresh_compiler():
        with torch._dynamo.compiled_autograd._enable(as_captured):
            loss = mean_square(model, _batch())
            if compiled:
                loss.backward()
        if not compiled:
            loss.backward()
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)
    assert len(lines) == (0 if compiled else 1)


@spmd(ranks=2)
def test_39_a_second_backward_adds_its_mean() -> None:
    with backwards_compiled_by(as_captured):
        model, eager = _model(), _model()
        replicate(model)
        for step in range(2):
            _backward(model, step)
    replicate(eager)
    for step in range(2):
        _backward(eager, step)
    torch.testing.assert_close(full_gradients(model), full_gradients(eager), rtol=1e-9, atol=1e-11)


# --- models that are not compiled ---------------------------------------------------------------


@spmd(ranks=2)
def test_39_eager_runs_call_no_functional_collective() -> None:
    model = _model()
    replicate(model)
    with pytest.MonkeyPatch.context() as patch, fresh_compiler():
        patch.setattr(traced, "all_reduce", None)
        for called in (model, torch.compile(model, backend="aot_eager")):
            _backward(called)
    assert _tracing_hooks(model) == 0


@spmd(ranks=2)
def test_39_a_model_that_is_not_compiled_after_all_falls_back_and_says_so_once() -> None:
    model, eager = _model(), _model()
    replicate(model)
    replicate(eager)
    with logged() as lines, fresh_compiler():
        for step in range(3):
            with torch._dynamo.compiled_autograd._enable(as_captured):
                loss = mean_square(model, _batch(step))
            assert _tracing_hooks(model) == (0 if step else len(list(model.parameters())))
            loss.backward()
            assert _tracing_hooks(model) == 0
            _backward(eager, step)
    torch.testing.assert_close(full_gradients(model), full_gradients(eager), rtol=1e-9, atol=1e-11)
    assert len(lines) == 1
    assert "its backward was not compiled" in lines[0]
    _refuses(model, "an earlier backward of this model was not compiled")


@spmd(ranks=2)
def test_39_compiled_and_eager_backwards_may_alternate() -> None:
    model, eager = _model(), _model()
    replicate(model)
    replicate(eager)
    with logged() as lines:
        for step, compiled in enumerate([True, False, True, False, False]):
            with ExitStack() as stack:
                if compiled:
                    stack.enter_context(backwards_compiled_by(as_captured))
                _backward(model, step)
            assert bool(_tracing_hooks(model)) is compiled
            _backward(eager, step)
    torch.testing.assert_close(full_gradients(model), full_gradients(eager), rtol=1e-9, atol=1e-11)
    assert lines == []


# --- what is refused ----------------------------------------------------------------------------


def _refuses(model: nn.Module, said: str) -> None:
    """A compiled backward is refused, and the next eager step has the right numbers."""
    model.zero_grad()
    with backwards_compiled_by(as_captured), pytest.raises(DifferentiationError, match=said):
        _backward(model)
    model.zero_grad()
    _backward(model)


def _hooked(model: nn.Module) -> None:
    replicate(model)
    register_comm_hook(model, None, lambda _, bucket: bucket.buffer())


def _looked_up(model: nn.Module) -> None:
    model.append(_Lookup())  # type: ignore[operator]
    replicate(model)


def _beside_shards(model: nn.Module) -> None:
    fully_shard(model.get_submodule("0"), reshard_after_forward=False)
    replicate(model)


def _hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, policy={nn.Linear})


def _distribute(model: nn.Module) -> None:
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicate(model, mesh=mesh["dp"])


def _counted(model: nn.Module) -> None:
    replicate(model)
    local_steps(
        model,
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}),
        every=2,
    )


REFUSED: Final[dict[str, tuple[Callable[[nn.Module], object], str]]] = {
    "communication hook": (_hooked, "has a communication hook"),
    "shards": (_beside_shards, "has shards"),
    "shards that are freed": (lambda model: fully_shard(model, policy={nn.Linear}), "has shards"),
    "shards on two dimensions": (_hybrid, "has shards"),
    "a cast": (
        lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "mixed precision policy",
    ),
    "steps in backward that are counted": (_counted, "local_steps counts the backwards"),
    "tensor parallel": (_distribute, "has tensor-parallel parameters"),
    "sparse gradients": (_looked_up, "has sparse gradients"),
    "mixed precision": (
        lambda model: replicate(model, mp_policy=MixedPrecisionPolicy(torch.float32)),
        "mixed precision policy",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@spmd(ranks=2)
def test_39_what_the_compiler_cannot_reduce_is_named(what: str) -> None:
    annotate, said = REFUSED[what]
    model = _model()
    annotate(model)
    _refuses(model, said)


@spmd(ranks=2)
def test_39_shards_train_where_autograd_itself_runs_the_backward_after_all() -> None:
    model, expected = _model(), _model()
    for each in (model, expected):
        fully_shard(each, policy={nn.Linear})
    _backward(expected)
    with torch._dynamo.compiled_autograd._enable(as_captured):
        out = model(_batch())
        out += 0  # outputs may be written to
        loss = out.square().mean()
    loss.backward()
    torch.testing.assert_close(full_gradients(model), full_gradients(expected), rtol=0, atol=0)


@spmd(ranks=2)
def test_39_compiled_autograd_must_be_on_when_the_forward_begins() -> None:
    model = _model()
    replicate(model)
    loss = mean_square(model, _batch())
    with (
        backwards_compiled_by(as_captured),
        pytest.raises(DifferentiationError, match="not on when the forward began"),
    ):
        loss.backward()
    model.zero_grad()
    with backwards_compiled_by(as_captured):
        _backward(model)
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)


@spmd(ranks=2)
@pytest.mark.parametrize("around_forward", [True, False])
def test_39_no_sync_around_a_compiled_backward_is_refused(around_forward: bool) -> None:
    model = _model()
    replicate(model)
    with backwards_compiled_by(as_captured), ExitStack() as stack:
        if around_forward:
            stack.enter_context(no_sync(model))
        loss = mean_square(model, _batch())
        stack.enter_context(no_sync(model))
        with pytest.raises(DifferentiationError, match="under no_sync"):
            loss.backward()
    model.zero_grad()
    _backward(model)
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)


@spmd(ranks=2)
def test_39_gradients_that_wait_to_be_reduced_are_not_mixed_with_others() -> None:
    model = _model()
    replicate(model)
    with no_sync(model):
        _backward(model)
    with (
        backwards_compiled_by(as_captured),
        pytest.raises(DifferentiationError, match="accumulates gradients under no_sync"),
    ):
        _backward(model)


@spmd(ranks=2)
def test_39_skipped_units_are_refused_by_name() -> None:
    model = _model()
    replicate(model, policy={nn.Linear})

    def skip_the_last(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        skipped(module.get_submodule("3"), args[0])

    handle = model.register_forward_pre_hook(skip_the_last)
    with (
        backwards_compiled_by(as_captured),
        pytest.raises(PhaseError, match="skipped: compiled autograd is on"),
    ):
        _backward(model)
    handle.remove()
    model.zero_grad()
    _backward(model)
    torch.testing.assert_close(full_gradients(model), _expected(), rtol=1e-9, atol=1e-11)
