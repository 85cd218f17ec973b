"""Optimizers, communication hooks and scopes of steps that cannot be."""

# Messages are compared word for word, each on one line.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms._comm_hooks import default_hooks as hooks_of_fsdp1
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import (
    HierarchicalAverager,
    PeriodicAverager,
    apply_optimizer_in_backward,
    average_parameters,
    checkpoint,
    clip_grad_norm_,
    errors,
    fully_shard,
    join,
    joinable,
    local_steps,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    register_forward_method,
    remove,
    replicate,
    step_on_matrices,
    step_on_shards,
    together,
    watch,
)
from tests.algorithms.replicas import annotated, grid
from tests.helpers.hooked_models import BOTH, KINDS, loss_of, mesh_of, model_of
from tests.helpers.world import current_device
from tests.optim.copies import Sign
from tests.optim.matrix_models import Net, Shampoo, backward, made, muon
from tests.refusals.table import Refusals, row
from tests.state.models import Block, plain, tokens

VERBS: Any = (fully_shard, replicate)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(current_device())


def _x() -> Tensor:
    return torch.ones(2, 3, device=current_device())


def _sgd(model: nn.Module) -> optim.SGD:
    return optim.SGD(model.parameters(), lr=0.1)


def _two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]


# --- clipping -----------------------------------------------------------------------------------


@row()
def what_cannot_be_clipped() -> Refusals:
    parameter: Any = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    for limit, order in ((-1.0, 2.0), (1.0, 0), (1.0, -math.inf)):
        bounds: Any = limit, order
        yield lambda bounds=bounds: clip_grad_norm_(parameter, *bounds), f"ClippingError: clip_grad_norm_: max_norm must be a number that is not negative, and norm_type must be a positive number or inf, got {limit!r} and {order}. To measure the norm only, pass max_norm=float('inf')"
    model = nn.Linear(1, 1)
    others: dict[str, Any] = {"tuple of str, Parameter": model.named_parameters(), "Linear": [model]}
    for kind, given in others.items():
        yield lambda given=given: clip_grad_norm_(given, 1.0), f"ClippingError: clip_grad_norm_: module must be a module, a tensor or an iterable of tensors, got a {kind} in it. Pass the model, or model.parameters()"
    yield lambda: clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True), "NonFiniteError: clip_grad_norm_: the norm of order 2 over all gradients is inf. No gradient was changed. Skip this step: optimizer.zero_grad(), then the next batch; with a GradScaler, pass error_if_nonfinite=False"
    assert parameter.grad.tolist() == [math.inf, 1.0], "nothing was changed"
    assert issubclass(errors.ClippingError, ValueError)
    assert issubclass(errors.NonFiniteError, RuntimeError)


@row(2)
def gradients_that_are_not_sharded_like_their_parameters() -> Refusals:
    mesh, zeros = init_device_mesh(current_device().type, (2,)), torch.zeros(4, 2, device=current_device())
    parameter = nn.Parameter(distribute_tensor(zeros, mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(zeros, mesh, [Partial()], run_check=False)
    partial = nn.Parameter(DTensor.from_local(zeros, mesh, [Partial()], run_check=False))
    yield lambda: clip_grad_norm_(parameter, 1.0), "ClippingError: clip_grad_norm_: a parameter of shape (4, 2) is a DTensor with placements (Replicate(),), but its gradient is a DTensor with placements (Partial(sum),). Redistribute the gradient to the parameter's mesh and placements first"
    yield lambda: clip_grad_norm_(partial, 1.0), "ClippingError: clip_grad_norm_: of a parameter with placements (Partial(sum),), each rank holds a summand only. Redistribute it first: p.redistribute(p.device_mesh, [Replicate()] * p.device_mesh.ndim)"


# --- steps on shards and on whole matrices ------------------------------------------------------


class Louder(optim.AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@row()
def optimizers_that_do_not_step_element_by_element() -> Refusals:
    unknown = "is not known here, or changes how its base class steps. If it updates each element from that element of the parameter, its gradient and its state alone, say so: step_on_shards(optimizer, elementwise=True); otherwise leave it out"
    for kind in (optim.LBFGS, optim.Adafactor, optim.Muon, optim.SparseAdam):
        optimizer: Any = kind([nn.Parameter(torch.ones(2, 2))])  # type: ignore[call-arg]
        for vouched in (False, True):
            yield lambda optimizer=optimizer, vouched=vouched: step_on_shards(optimizer, elementwise=vouched), f"OptimizerError: step_on_shards: {kind.__name__} does not step element by element. Leave step_on_shards out, or give parameters that another optimizer could step to one of their own"
        assert not optimizer._optimizer_step_pre_hooks
    yield lambda: step_on_shards(Louder(_two())), f"OptimizerError: step_on_shards: Louder {unknown}"
    yield lambda: step_on_shards(Sign(_two(), {"lr": 0.1})), f"OptimizerError: step_on_shards: Sign {unknown}"
    yield lambda: step_on_shards(optim.Adam(_two(), differentiable=True)), "OptimizerError: step_on_shards: this Adam is differentiable: its steps become part of a graph that local tensors would be missing from. Leave step_on_shards out, or differentiable=True"
    yield lambda: step_on_shards(nn.Linear(1, 1)), "ArgumentError: step_on_shards: optimizer must be an Optimizer, got a Linear"  # type: ignore[arg-type]


@row()
def what_cannot_step_on_matrices() -> Refusals:
    stepped = Shampoo(_two())
    for parameter in stepped.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    taken = step_on_matrices(Shampoo(_two()))
    as_one = "steps all of its parameters as one, or one by one in backward, and cannot be given some of them whole. Use another optimizer"
    yield lambda: step_on_matrices(nn.Linear(1, 1)), "ArgumentError: step_on_matrices: optimizer must be an Optimizer, got a Linear"  # type: ignore[type-var]
    yield lambda: step_on_matrices(optim.LBFGS(_two())), f"OptimizerError: step_on_matrices: LBFGS {as_one}"
    yield lambda: step_on_matrices(apply_optimizer_in_backward(optim.SGD, _two(), {"lr": 0.1})), f"OptimizerError: step_on_matrices: OptimizerInBackward {as_one}"
    yield lambda: step_on_matrices(optim.Adam(_two(), differentiable=True)), "OptimizerError: step_on_matrices: this Adam is differentiable: its steps become part of a graph that whole matrices would be missing from. Leave differentiable=True out"
    yield lambda: step_on_matrices(stepped), "OptimizerError: step_on_matrices: this Shampoo has state already, of which each rank has a part: it has stepped, was loaded, or makes some when it is made, as Adagrad does. Call step_on_matrices when the optimizer is made, and load the state then; one that makes state at once cannot be given whole matrices"
    yield lambda: step_on_matrices(taken, lambda parameter: True), "OptimizerError: step_on_matrices: which= was chosen for this Shampoo already, and its state is with the owners. Make a new optimizer"
    yield lambda: step_on_matrices(Shampoo(_two()), ["no such"]), "OptimizerError: step_on_matrices: which= has 'no such', which Shampoo does not hold; there is: none"
    yield lambda: step_on_matrices(Shampoo(_two()), _two()), "OptimizerError: step_on_matrices: which= has a parameter of shape (2, 2), which Shampoo does not hold; there is: none"
    yield lambda: step_on_shards(taken, elementwise=True), "OptimizerError: step_on_shards: this Shampoo steps whole matrices (step_on_matrices), and what is no matrix on its shards. Leave step_on_shards out"
    assert step_on_matrices(taken) is taken


def _other_matrices() -> Refusals:
    for how in ("selected", "missing", "in another order", "none"):
        model, which = fully_shard(made(Net), policy={nn.Linear}), None
        parameters: list[Any] = list(model.parameters())
        third = parameters[2]
        if dist.get_rank() == 1:
            if how == "missing":
                del parameters[2]
            elif how == "in another order":
                parameters.reverse()
            else:
                which = lambda parameter, how=how, third=third: how == "selected" and parameter is not third  # noqa: E731
        yield lambda parameters=parameters, which=which: step_on_matrices(Shampoo(parameters), which), "RanksDisagreeError: ...the ranks step other matrices: rank 0..."


@row(2)
def other_matrices_on_one_of_two_ranks() -> Refusals:
    yield from _other_matrices()


@row(3)
def other_matrices_on_one_of_three_ranks() -> Refusals:
    yield from _other_matrices()


class Twice(Shampoo):
    """Calls its closure before and after it reads its groups, as sharpness-aware ones do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            assert group["params"] is not None
        return closure()


@row(2)
def a_closure_that_is_called_after_gradients_have_left() -> Refusals:
    model = fully_shard(made(Net), policy={nn.Linear})
    optimizer = step_on_matrices(Twice(model.parameters()))

    def closure() -> None:
        optimizer.zero_grad()
        backward(model, 0, dist.get_rank(), 7)

    yield lambda: optimizer.step(closure), "OptimizerError: ...calls its closure after it has read its parameter..."


@row(2)
def a_partial_matrix() -> Refusals:
    mesh, local = init_device_mesh(current_device().type, (2,)), torch.ones(4, 4, device=current_device())
    whole, part = (nn.Parameter(DTensor.from_local(local, mesh, [each])) for each in (Replicate(), Partial()))
    yield lambda: step_on_matrices(muon([part])), "OptimizerError: ...has the placement P...Leave it to another..."
    optimizer = step_on_matrices(muon([whole]))
    whole.grad = torch.ones_like(whole)
    optimizer.step()
    assert whole.to_local().mean().item() != 1  # type: ignore[attr-defined]


@row(2)
def gradients_of_matrices_that_lie_otherwise() -> Refusals:
    model = made(Net, biases=True)
    fully_shard(model, policy={nn.Linear})
    optimizer = step_on_matrices(Shampoo(model.parameters()))
    for name, said in {"weight": "lies otherwise than the", "bias": "cannot be stepped on their shards"}.items():
        backward(model, 0, dist.get_rank(), 7)
        parameter = getattr(model.layers[4], name)
        kept, parameter.grad = parameter.grad, parameter.grad.redistribute(placements=[Replicate()])
        yield optimizer.step, f"OptimizerError: ...{said}..."
        parameter.grad = kept
        optimizer.step()
        optimizer.zero_grad()


@row(2)
def gradients_of_matrices_that_are_not_reduced() -> Refusals:
    model = fully_shard(made(Net), policy={nn.Linear})
    optimizer = step_on_matrices(muon(model.parameters()))
    with no_sync(model):
        backward(model, 0, dist.get_rank(), 7)
    yield optimizer.step, "OptimizerError: ...is this rank's alone..."


# --- optimizers in backward ---------------------------------------------------------------------


class Counting(optim.SGD):
    """Keeps one number for all parameters, as optimizers do that adapt themselves."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


@row(2)
def what_cannot_step_in_backward() -> Refusals:
    model = _layers()
    original = model[0].weight
    fully_shard(model, policy={nn.Linear})
    apply: Any = apply_optimizer_in_backward
    for given, said in (
        ((optim.SGD, model), "params must be parameters, e.g. model.parameters(), got a Linear"),
        ((optim.SGD, [{"params": []}]), "Call it once for each parameter group"),
        ((optim.SGD, [original]), "is not registered any more"),
        ((optim.LBFGS, model.parameters()), "LBFGS steps all parameters together"),
    ):
        yield lambda given=given: apply(*given), f"OptimizerError: ...{said}..."
    yield lambda: apply(nn.Linear, model.parameters()), "ArgumentError: apply_optimizer_in_backward: optimizer_class must be a class of Optimizers, got the class Linear"
    apply(Counting, model.parameters(), {"lr": 0.1})
    yield lambda: model(_x()).sum().backward(), "OptimizerError: ...Counting wrote 'k' to its parameter group..."


@row(2)
def steps_by_hand_of_an_optimizer_in_backward() -> Refusals:
    for verb in VERBS:
        model = verb(_layers(), policy={nn.Linear})
        optimizer = apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
        scaler = torch.amp.GradScaler(current_device().type, init_scale=4.0)
        scaler.scale(model(_x()).sum()).backward()
        yield lambda scaler=scaler, optimizer=optimizer: scaler.step(optimizer), "OptimizerError: ...a GradScaler came to step this optimizer, but backward has stepped already..."
        off = torch.amp.GradScaler(current_device().type, enabled=False)
        off.scale(model(_x()).sum()).backward()
        off.step(optimizer)  # one that does nothing may
        with no_sync(model):
            model(_x()).sum().backward()
        yield optimizer.step, "OptimizerError: ...this rank's alone..."


@row(1)
def an_optimizer_in_backward_inside_a_backward() -> Refusals:
    model = fully_shard(_layers(), policy={nn.Linear})
    first, *rest = model.parameters()
    optimizer = apply_optimizer_in_backward(optim.SGD, [first], {"lr": 0.1})
    for act in (optimizer.remove, lambda: apply_optimizer_in_backward(optim.SGD, rest, {"lr": 0.1})):
        output = model(_x())
        output.register_hook(lambda _, act=act: act())  # type: ignore[misc]
        yield output.sum().backward, "PhaseError: ...inside a backward..."


# --- communication hooks ------------------------------------------------------------------------

_HAS_ONE = "AlreadyAnnotatedError: register_comm_hook: unit '{}' has the communication hook {} already. Remove it first, by the handle that registering it returned"
_IN_A_STEP = "PhaseError: {}: unit '(root)' is in the middle of a step: in a forward or backward, between them, or in no_sync, with accumulated gradients. Do it between two steps; what is not trained on belongs under torch.no_grad()"
_OTHER_STAGE = "AnnotationError: register_comm_hook: gradients of unit '(root)' are reduced by {}; stage= must name the one that the hook replaces, got {!r}"


@row(2)
def what_is_no_communication_hook() -> Refusals:
    model, register = replicate(model_of()), register_comm_hook
    x: Any = torch.ones(1, 6, device=current_device())
    nobody = "NotAnnotatedError: register_comm_hook: Sequential is not annotated; call replicate(module) or fully_shard(module) first. Of units without a module around them, each takes a hook of its own"
    of_fsdp1 = "AnnotationError: register_comm_hook: torch.distributed.algorithms._comm_hooks.default_hooks.{} is made for FSDP1, which calls it with a tensor and not with a bucket. Use the hooks of torch.distributed.algorithms.ddp_comm_hooks"
    yield lambda: register(nn.Sequential(), None, noop_hook), nobody
    yield lambda: register(nn.Sequential(model), None, noop_hook), nobody
    yield lambda: register([model, replicate(model_of())], None, noop_hook), "NotAnnotatedError: register_comm_hook takes one module, or a list that was annotated as one, and Model was not annotated together with the first one. Register a hook for each, with a state of its own"
    yield lambda: register(model, noop_hook, {}), "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and dict cannot be called. It stands after its state: register_comm_hook(module, state, hook)"  # type: ignore[arg-type]
    yield lambda: register(model, None, lambda bucket: bucket), "AnnotationError: register_comm_hook: a hook is called as hook(state, bucket), and <lambda> takes (bucket). Bind other arguments with functools.partial"  # type: ignore[arg-type,misc]
    yield lambda: register(model, None, hooks_of_fsdp1.bf16_compress_hook), of_fsdp1.format("bf16_compress_hook")
    yield lambda: register(fully_shard(model_of()), None, partial(hooks_of_fsdp1.reduce_scatter_hook, output=x)), of_fsdp1.format("reduce_scatter_hook")
    for stage in ("all_gather", "reduce_scatter"):
        yield lambda stage=stage: register(model, None, noop_hook, stage=stage), _OTHER_STAGE.format("all_reduce", stage)
    register(model, None, noop_hook)
    yield lambda: register(model, None, allreduce_hook), _HAS_ONE.format("(root)", "'noop_hook'")


@row(2)
def communication_hooks_in_the_middle_of_a_step() -> Refusals:
    def accumulated(model: Any) -> None:
        with no_sync(model):
            model(x).sum().backward()

    x = torch.ones(1, 6, device=current_device())
    model = replicate(model_of())
    output, said = model(x), _IN_A_STEP.format("register_comm_hook")
    yield lambda: register_comm_hook(model, None, noop_hook), said
    output.register_hook(lambda _: register_comm_hook(model, None, noop_hook))
    yield output.sum().backward, said
    for kind in ("replicated", "sharded"):
        accumulated(model := KINDS[kind]())
        yield lambda model=model: register_comm_hook(model, None, allreduce_hook), said
    handle = register_comm_hook(model := replicate(model_of()), None, noop_hook)
    accumulated(model)
    yield handle.remove, _IN_A_STEP.format("remove a communication hook")


@row(2, pytest.mark.sparse)
def a_communication_hook_for_sparse_gradients() -> Refusals:
    table = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 1)).to(current_device())
    yield lambda: register_comm_hook(replicate(table), None, noop_hook), "AnnotationError: register_comm_hook: the gradient of parameter '0.weight' of unit '(root)' is sparse, and hooks take dense ones. Make its embedding with sparse=False, or leave it to a unit without a hook"


@row(4)
def communication_hooks_of_other_stages_of_shards() -> Refusals:
    sharded, within, hybrid = KINDS["sharded"](), model_of(), KINDS["hybrid"]()
    fully_shard(within.head)
    fully_shard(within, mesh=mesh_of())
    yield lambda: register_comm_hook(sharded, None, allreduce_hook, stage="all_reduce"), _OTHER_STAGE.format("reduce_scatter", "all_reduce")
    yield lambda: register_comm_hook(within, None, allreduce_hook, stage="reduce_scatter"), "MeshError: register_comm_hook: unit 'head' is on another mesh than the module that the hook is for. Register a hook for each, with a state of its own"
    for stage in (None, "all_gather"):
        yield lambda stage=stage: register_comm_hook(hybrid, None, allreduce_hook, stage=stage), _OTHER_STAGE.format("reduce_scatter and then by all_reduce", stage)
    register_comm_hook(sharded.head, None, allreduce_hook)
    yield lambda: register_comm_hook(sharded, None, allreduce_hook), _HAS_ONE.format("head", "'allreduce_hook'")
    rank, other = dist.get_rank(), 0 if dist.get_rank() == 3 else 3
    mine, theirs = ("all_reduce" if each == 3 else "reduce_scatter" for each in (rank, other))
    yield lambda: register_comm_hook(hybrid, None, allreduce_hook, stage=mine), f"RanksDisagreeError: register_comm_hook: rank {other} registers allreduce_hook for {theirs}, and rank {rank} registers allreduce_hook for {mine}; no rank registers a hook. All ranks register the same hooks, in the same order"
    for stage in BOTH:
        register_comm_hook(hybrid.head, None, allreduce_hook, stage=stage)
    yield lambda: register_comm_hook(hybrid, None, allreduce_hook, stage="all_reduce"), _HAS_ONE.format("head", "'allreduce_hook' for all_reduce")


@row(2)
def a_communication_hook_that_one_rank_refuses() -> Refusals:
    model, first = replicate(model_of()), dist.get_rank() == 0
    mine: Any = noop_hook if first else None
    yield lambda: register_comm_hook(model, None, mine), "RanksDisagreeError: register_comm_hook: rank 1 refuses: register_comm_hook: a hook is called as..." if first else "AnnotationError: ..."
    names = ("allreduce_hook", "noop_hook") if first else ("noop_hook", "allreduce_hook")
    yield lambda: register_comm_hook(model, None, noop_hook if first else allreduce_hook), f"RanksDisagreeError: register_comm_hook: rank {int(first)} registers {names[0]}, and rank {int(not first)} registers {names[1]}; no rank registers a hook. All ranks register the same hooks, in the same order"
    register_comm_hook(model, None, allreduce_hook)
    loss_of(model, 0).backward()


@row(2)
def a_communication_hook_that_leaves_replicas_of_local_steps() -> Refusals:
    for plan in ("replicate", "hybrid"):
        model, _ = annotated(plan, 2)
        register_comm_hook(model, None, allreduce_hook, stage="all_reduce")
        yield lambda model=model: local_steps(model, _sgd(model), every=2), "AnnotationError: local_steps: unit '...' has the communication hook 'allreduce_hook'..."


# --- averages, and replicas that train apart ----------------------------------------------------


@row(2)
def averages_that_cannot_be() -> Refusals:
    mesh = grid(2)
    model, hybrid = fully_shard(plain(), policy={Block}), fully_shard(plain(), mesh=mesh, policy={Block})
    given: Any = mesh
    yield lambda: average_parameters(model), "MeshError: ...has no dimension 'replicate'. Its dimensions are without names..."
    yield lambda: average_parameters(hybrid, over="replicates"), "MeshError: ...has no dimension 'replicates'; did you mean 'replicate'?..."
    yield lambda: average_parameters(hybrid, over=given), "MeshError: ...over must be ... got DeviceMesh of 2 dimensions..."
    yield lambda: average_parameters(plain()), "NotAnnotatedError: average_parameters: no fully sharded or replicated module..."
    yield lambda: PeriodicAverager(hybrid, period=0), "ArgumentError: PeriodicAverager: period must be a whole number of at least 1, got 0"
    yield lambda: PeriodicAverager(hybrid, period=2, warmup_steps=-1), "ArgumentError: PeriodicAverager: warmup_steps must be a whole number of at least 0, got -1"
    model = replicate(plain())
    model.blocks[0].register_forward_hook(lambda *_: average_parameters(model))
    yield lambda: model(tokens(0)), "PhaseError: average_parameters was called inside of the forward..."


@row(4)
def averages_over_a_dimension_that_shards() -> Refusals:
    mesh = grid(2)
    model = fully_shard(plain(), mesh=mesh, policy={Block})
    shards, some = "0, 1" if dist.get_rank() < 2 else "2, 3", dist.new_group([0, 1, 2])
    groups = [(dist.group.WORLD, "0, 1, 2, 3"), (some, "0, 1, 2")][: 2 if dist.get_rank() < 3 else 1]
    for over, ranks in (("shard", shards), (mesh["shard"], shards), *groups):
        given: Any = over
        yield lambda given=given: average_parameters(model, over=given), f"MeshError: average_parameters: unit '(root)' is sharded over ranks {ranks} ..."
    if dist.get_rank() < 3:  # all ranks are to know as many groups
        dist.destroy_process_group(some)
    yield lambda: PeriodicAverager(model, period=2, over="shard"), "MeshError: PeriodicAverager: unit '(root)' is sharded..."


@row(4)
def periods_and_sizes_that_do_not_divide() -> Refusals:
    model = replicate(plain())
    for periods, error, said in (
        ({3: 2, 4: 4}, "MeshError", "groups of 3 ranks do not divide groups of 4"),
        ({2: 3, 4: 4}, "AnnotationError", "groups of 4 ranks average every 4 steps, which the 3 steps of groups of 2 do not divide..."),
        ({2: 2}, "MeshError", "the largest group must have the 4 ranks that unit '(root)' is averaged over (over='replicate'), got sizes [2]"),
        ({2: 0, 4: 4}, "AnnotationError", "sizes and periods must be at least 1..."),
    ):
        yield lambda periods=periods: HierarchicalAverager(model, periods=periods), f"{error}: HierarchicalAverager: {said}"


@row(2)
def local_steps_that_cannot_be() -> Refusals:
    sharded = fully_shard(plain(), policy={Block})
    over: Any = dist.group.WORLD
    yield lambda: local_steps(sharded, _sgd(sharded), every=2), "MeshError: local_steps: the mesh of unit '(root)', ... has no dimension 'replicate'..."
    yield lambda: local_steps(sharded, _sgd(sharded), every=2, over=over), "MeshError: local_steps: unit '(root)' is sharded over ranks 0, 1..."
    model, _ = annotated("hybrid", 2)
    optimizer = _sgd(model)
    yield lambda: local_steps(model, optimizer, every=0), "ArgumentError: local_steps: every must be a whole number of at least 1, got 0"
    yield lambda: local_steps(model, optimizer, every=4, delay=4), "AnnotationError: local_steps: delay must be from 0 to every - 1 = 3, got 4..."
    yield lambda: local_steps(model, optimizer, every=4, keep=2.0), "ArgumentError: local_steps: keep must be a number from 0 to 1, got 2.0"
    yield lambda: local_steps(model, [], every=2), "OptimizerError: local_steps: the list of optimizers is empty..."
    loss = model(tokens(0)).sum()
    yield lambda: local_steps(model, optimizer, every=2), "PhaseError: local_steps: unit '(root)' is in the middle of a step..."
    loss.backward()
    local_steps(model, optimizer, every=2)
    yield lambda: local_steps(model, optimizer, every=2), "AlreadyAnnotatedError: local_steps: the replicas of unit '(root)' train apart already..."


@row(4)
def local_steps_of_some_of_the_replicas() -> Refusals:
    model, pairs = replicate(plain()), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    over: Any = pairs[dist.get_rank() // 2]
    yield lambda: local_steps(model, _sgd(model), every=2, over=over), "MeshError: ...only some of the replicas that unit '(root)' is reduced over..."


# --- scopes of steps ----------------------------------------------------------------------------


def _enter(*scopes: Any, act: Any = lambda: None) -> None:
    if not scopes:
        act()
        return
    with scopes[0]:
        _enter(*scopes[1:], act=act)


@row(2)
def steps_together_that_cannot_be() -> Refusals:
    model, other = (fully_shard(_layers()) for _ in range(2))
    yield lambda: _enter(together(model), together(model)), "PhaseError: ...inside of another one..."
    with together(model) as step:
        pass
    assert not step.lost
    yield lambda: _enter(join(model, _sgd(model)), together(model)), "PhaseError: ...inside of join..."
    yield lambda: _enter(together(model), act=lambda: other(_x())), "PhaseError: ...another annotated model..."
    yield lambda: together(_layers()), "NotAnnotatedError: ...together..."
    with no_sync(model):
        model(_x()).sum().backward()
    yield lambda: together(model), "PhaseError: ...has accumulated gradients..."
    for model, what in (
        (replicate(_layers()), "a communication hook"),
        (fully_shard(_layers()), "an optimizer in backward"),
        (fully_shard(_layers().append(nn.SyncBatchNorm(1))), "is a SyncBatchNorm"),
    ):
        if "hook" in what:
            register_comm_hook(model, None, lambda group, bucket: bucket.buffer())
        if "optimizer" in what:
            apply_optimizer_in_backward(optim.SGD, model.parameters(), {"lr": 0.1})
        yield lambda model=model: together(model), f"UnsupportedError: ...{what}..."


@row(4)
def steps_together_with_other_messages() -> Refusals:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    distributed: Any = parallelize_module(_layers(), mesh["tp"], {"0": ColwiseParallel()})
    yield lambda: together(fully_shard(distributed, mesh=mesh["dp"])), "UnsupportedError: ...tensor-parallel parameters..."
    yield lambda: together(fully_shard(_layers(), reshard_after_forward=2)), "UnsupportedError: ...reshard_after_forward with a number of ranks..."


def _joined() -> tuple[nn.Sequential, optim.SGD]:
    model = fully_shard(_layers(), policy={nn.Linear})
    return model, _sgd(model)


@row(2)
def shards_without_an_optimizer_in_join() -> Refusals:
    for runs in (True, dist.get_rank() == 1):
        model, _ = _joined()
        yield lambda model=model, runs=runs: _enter(join(model), act=lambda: runs and model(_x()).sum().backward()), "OptimizerError: join: parameter 'weight' of unit '0' is trained by no optimizer that the scope knows..."


@row(2)
def a_model_that_is_annotated_in_join() -> Refusals:
    model, optimizer = _joined()

    def act() -> None:
        added = fully_shard(nn.Linear(1, 2).to(current_device()))
        if dist.get_rank() == 1:
            model.append(added)
            model(_x())

    yield lambda: _enter(join(model, optimizer), act=act), "PhaseError: unit '3' was annotated inside of a join scope..."


@row(2)
def what_join_was_not_given() -> Refusals:
    model, _ = _joined()
    teacher, _ = _joined()
    yield lambda: _enter(join(model), act=lambda: dist.get_rank() and teacher(_x())), "PhaseError: unit '(root)' of another model ran inside of a join scope..."
    model, optimizer = _joined()
    scaler = torch.amp.GradScaler(current_device().type)

    def scaled() -> None:
        scaler.scale(model(_x()).sum()).backward()
        scaler.step(optimizer)

    yield lambda: _enter(join(model, optimizer), act=scaled), "OptimizerError: join: GradScaler scales gradients of a model in the scope, and is not known to it..."


@row(2)
def a_step_with_a_closure_in_join() -> Refusals:
    model, optimizer = _joined()

    def act() -> None:
        model(_x()).sum().backward()
        optimizer.step(lambda: 1.0)

    yield lambda: _enter(join(model, optimizer), act=act), "OptimizerError: join: SGD.step was called with a closure..."


@row(2)
def what_joinable_cannot_take() -> Refusals:
    model, other = _layers(), _layers()
    given: Any = 3
    yield lambda: joinable(model), "NotAnnotatedError: joinable: no fully sharded or replicated module..."
    fully_shard(model, policy={nn.Linear})
    yield lambda: joinable(model, given), "OptimizerError: joinable: a int is neither a model nor an optimizer..."
    fully_shard(other, mesh=DeviceMesh(current_device().type, [dist.get_rank()]))
    yield lambda: joinable(model, other), "MeshError: joinable: unit '(root)' is on ranks [..."
    yield lambda: Join([joinable(model), joinable(other)]), f"MeshError: joinable: unit '(root)' is on ranks [{dist.get_rank()}] of..."


@row()
def accumulation_of_nothing() -> Refusals:
    model = fully_shard(nn.Linear(2, 2))
    level: Any = "replicas"
    none = "no fully sharded or replicated module in this Linear; call fully_shard(module) or replicate(module) first"
    yield lambda: _enter(no_sync(model, level=level)), "ArgumentError: no_sync: level must be 'all' or 'replicate', got the str 'replicas'; did you mean 'replicate'?"
    yield lambda: _enter(no_sync(nn.Linear(2, 2))), f"NotAnnotatedError: no_sync: {none}"
    yield lambda: reduce_gradients(nn.Linear(2, 2)), f"NotAnnotatedError: reduce_gradients: {none}"


@row()
def what_cannot_be_watched() -> Refusals:
    model = replicate(nn.Linear(2, 2))
    yield lambda: watch(nn.Linear(2, 2)), "NotAnnotatedError: ...watch: no fully sharded or replicated module..."
    yield lambda: watch(model, every=0), "ArgumentError: watch: every must be a whole number of at least 1, got 0"
    yield lambda: watch(model, action="stop"), "ArgumentError: watch: action must be 'warn' or 'raise', got the str 'stop'"  # type: ignore[arg-type]
    yield lambda: _enter(watch(model), act=lambda: watch(model)), "AlreadyAnnotatedError: ...'(root)' is watched already..."


# --- calls that are no forward ------------------------------------------------------------------


@row(2)
def methods_that_cannot_be_forwards() -> Refusals:
    model, plain_one = fully_shard(_layers()), checkpoint(_layers())
    said = "NotAnnotatedError: register_forward_method:"
    yield lambda: register_forward_method(model[0], "forward"), f"{said} '0' is not annotated itself; call fully_shard(module) or replicate(module) first"
    yield lambda: register_forward_method(plain_one, "insert"), f"{said} Sequential is not annotated itself; call fully_shard(module) or replicate(module) first"
    yield lambda: register_forward_method(model, "insrt"), f"{said} no method 'insrt' on Sequential; did you mean 'insert'?"
    yield lambda: register_forward_method(model, "0"), f"{said} no method '0' on Sequential"


@row(2)
def a_backward_after_remove() -> Refusals:
    for keep in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(current_device())
        fully_shard(model, policy={nn.Linear}, reshard_after_forward=not keep)
        x = torch.ones(1, 2, device=current_device())
        loss = model(x).sum()
        remove(model, fully_shard)
        yield loss.backward, "PhaseError: fully_shard was removed from unit '1' between a forward and its backward: the parameters that this backward goes to are no longer the module's. Run the backward first, or the forward again"
        model(x).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
