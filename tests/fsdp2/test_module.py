"""`FSDPModule` over annotated modules: who is one, and the methods of those who are."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import composable
from composable import no_sync, reduce_gradients, remove, replicate
from composable import summon_full_params as whole
from composable.comm.backends import comms_wrapped_by
from composable.engine.params.param_group import ShardedState
from composable.errors import (
    AnnotationError,
    ComposableError,
    MeshError,
    NotAnnotatedError,
    PhaseError,
    UnsupportedError,
)
from composable.fsdp2 import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from composable.fsdp2.module import NAMES
from tests.helpers.communicators import Log, Recording
from tests.helpers.compare import anatomy, full_gradients, full_parameters
from tests.helpers.refusals import refusal
from tests.helpers.world import Pool, current_device, spmd

_NEW_IN_2_15: Final = {
    "set_manual_backward_finalization",
    "finalize_backward",
    "set_keep_unsharded_storage",
}
# of 2.11, 2.13 and 2.14
_OLDER: Final = {
    "reshard",
    "unshard",
    "reset_iter_state",
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
}
_TORCHS: Final = fsdp.FSDPModule


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def _sharded(**options: Any) -> nn.Sequential:
    model = _layers()
    fully_shard(model[0], **options)
    fully_shard([model[2], model[3]], **options)
    return fully_shard(model, **options)


def _methods(module: nn.Module) -> list[str]:
    return [name for name in NAMES if hasattr(module, name)]


def _batch(number: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))


# --- names ---------------------------------------------------------------------------------------


def test_every_public_method_of_torchs_class_is_there() -> None:
    theirs = {name for name in vars(_TORCHS) if not name.startswith("_")}
    assert theirs - set(NAMES) == set()
    assert (_OLDER | _NEW_IN_2_15) - set(NAMES) == set()


def test_arguments_have_torchs_names_and_defaults() -> None:
    for name in NAMES:
        ours = inspect.signature(getattr(FSDPModule, name))
        if not hasattr(_TORCHS, name) or "kwargs" in ours.parameters:
            continue
        theirs = inspect.signature(getattr(_TORCHS, name))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ], name
    takes = list(inspect.signature(fully_shard).parameters)
    assert set(inspect.signature(fsdp.fully_shard).parameters) - set(takes) == set()


def test_every_method_says_what_it_does() -> None:
    assert [
        name for name in NAMES if name[0] != "_" and not getattr(FSDPModule, name).__doc__
    ] == []


# --- who is one ----------------------------------------------------------------------------------


@spmd(ranks=2)
def test_arguments_of_fully_shard_are_fsdp_modules_and_modules_below_are_not() -> None:
    model = _sharded()
    assert [isinstance(module, FSDPModule) for module in model.modules()] == [
        True, True, False, True, True,
    ]  # fmt: skip
    assert [len(_methods(module)) for module in model.modules()] == [
        len(NAMES), len(NAMES), 0, len(NAMES), len(NAMES),
    ]  # fmt: skip
    assert type(model) is nn.Sequential
    assert not isinstance(object(), FSDPModule)
    remove(model, fully_shard)
    assert not isinstance(model, FSDPModule)
    assert _methods(model) == []
    assert isinstance(model[3], FSDPModule)
    remove([model[2], model[3]], "fully_shard")
    assert _methods(model[2]) == _methods(model[3]) == []


@spmd(ranks=2)
def test_modules_that_composables_own_verb_annotated_get_methods_when_they_are_asked() -> None:
    model = _layers()
    composable.fully_shard(model, policy={nn.Linear})
    assert _methods(model[0]) == []
    assert isinstance(model[0], FSDPModule)
    assert len(_methods(model[0])) == len(NAMES)
    assert not isinstance(model[1], FSDPModule)
    remove(model, composable.fully_shard)
    assert _methods(model[0]) == []


def test_one_process_without_a_group_has_the_methods_too() -> None:
    model = fully_shard(_layers())
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)  # type: ignore[unreachable]
    model(torch.ones(1, 4)).sum().backward()
    model.reshard()
    assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential


@spmd(ranks=2)
def test_a_module_of_torchs_own_replicate_still_is_one() -> None:
    from torch.distributed._composable import replicate_with_fsdp  # noqa: PLC0415, slow
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415, slow

    mesh = init_device_mesh("cpu", (2,))
    assert isinstance(replicate_with_fsdp.replicate(_layers(), mesh=mesh), FSDPModule)


@spmd(ranks=2)
def test_a_slice_is_none_containers_and_a_second_call_are_refused() -> None:
    model = _sharded()
    assert not isinstance(model[:2], FSDPModule)
    assert isinstance(model[:2][0], FSDPModule)
    with pytest.raises(AnnotationError, match="was already applied"):
        fully_shard(model)
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(AnnotationError, match="has no forward"):
            fully_shard(container)
        assert not isinstance(container, FSDPModule)
        assert type(next(container.parameters())) is nn.Parameter


@spmd(ranks=2)
def test_a_state_dict_has_live_shards_also_of_an_unsharded_model() -> None:
    model = _sharded()
    model.unshard()
    state = model.state_dict()
    assert [type(value) for value in state.values()] == [DTensor] * len(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(not value.to_local().any() for value in state.values())


class Reshards(nn.Linear):
    def reshard(self) -> str:
        return "mine"


@spmd(ranks=2)
def test_a_name_that_the_model_uses_is_not_taken() -> None:
    model = Reshards(4, 4)
    model.unshard = nn.Identity()  # a child
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert model.reshard() == "mine"
    assert isinstance(model.unshard, nn.Identity)
    FSDPModule.unshard(model)
    assert type(model.weight) is nn.Parameter
    FSDPModule.reshard(model)
    assert isinstance(model.weight, DTensor)


class Forwards(nn.Module):
    """It looks names up in its child, as PEFT's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@spmd(ranks=2)
def test_a_module_that_forwards_names_to_its_child_has_methods_of_its_own() -> None:
    model = Forwards()
    fully_shard(model.inner)
    fully_shard(model)
    assert "unshard" in vars(model)


# --- copies --------------------------------------------------------------------------------------


@spmd(ranks=2)
def test_a_copy_has_working_methods_of_its_own() -> None:
    model = _sharded()
    model.set_requires_gradient_sync(False)
    clone = copy.deepcopy(model)
    assert isinstance(clone, FSDPModule)
    for each in (model, clone):
        each(_batch()).sum().backward()
    placements = [str(each[0].weight.grad.placements) for each in (model, clone)]
    assert placements == ["(Partial(avg),)", "(Shard(dim=0),)"]  # a copy is in no scope
    clone[0].unshard()
    assert type(clone[0].weight) is nn.Parameter
    assert isinstance(model[0].weight, DTensor)
    remove(clone, fully_shard)
    assert _methods(clone) == []
    assert len(_methods(model)) == len(NAMES)


@spmd(ranks=2)
def test_pickling_a_replicated_module_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicate(model[0])
    fully_shard(model[1])
    clone = pickle.loads(pickle.dumps(model[0]))
    assert type(clone) is nn.Linear
    assert _methods(clone) == []
    with pytest.raises(ComposableError, match="cannot be pickled"):
        pickle.dumps(model[1].unshard)


@spmd(ranks=2)
def test_a_method_does_not_keep_its_module() -> None:
    model = fully_shard(nn.Linear(4, 4))
    method, gone = model.unshard, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(NotAnnotatedError, match="the module of this method is gone"):
        method()


# --- behaviour that is not FSDP2's in torch 2.13 -------------------------------------------------


def _states(model: nn.Sequential) -> list[str]:
    units = [composable.fully_shard.state(module) for module in (model[0], model[2], model)]
    return [group.state.name for unit in units if unit for group in unit.groups]


@spmd(ranks=2)
def test_none_reshards_all_units_after_forward_but_the_outermost() -> None:
    model = _layers()
    model.append(nn.Linear(2, 2))  # the outermost unit has a parameter
    fully_shard(model[0])
    fully_shard([model[2], model[3]])
    fully_shard(model)
    model(_batch())
    sharded, unsharded = ShardedState.SHARDED.name, ShardedState.UNSHARDED.name
    assert _states(model) == [sharded, sharded, unsharded]
    remove(model, fully_shard)
    model[0](_batch())  # now it is outermost
    assert _states(model)[0] == unsharded


@spmd(ranks=2)
def test_ranks_with_different_weights_are_taken_as_they_are() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4, bias=False)
    own = model.weight.detach().clone()
    fully_shard(model)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = model.weight.to_local()  # type: ignore[operator]
    torch.testing.assert_close(found.cpu(), own[half])


@spmd(ranks=2)
def test_the_caller_can_end_backwards() -> None:
    outcomes = []
    for manual in (False, True):
        model = _sharded()
        model.set_manual_backward_finalization(manual)
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            model(_batch(number)).square().sum().backward()
            assert FSDPModule.finalize_backward(model) is None if manual else True
        model.set_requires_gradient_sync(True)
        model(_batch(2)).square().sum().backward()
        if manual:
            handle = model.finalize_backward(async_op=True)
            assert isinstance(handle, UnshardHandle)
            handle.wait()
        outcomes.append(full_gradients(model))
        model.synchronize_gradients()  # nothing is left
    for name, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], expected)


def _finalized(how: str) -> tuple[nn.Module, Log, Any]:
    """A model whose reductions were launched, and the handle."""
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        model = replicate(_layers()) if how == "replicate" else _sharded()
    assert isinstance(model, FSDPModule)
    model.set_manual_backward_finalization(True)
    model(_batch()).square().sum().backward()
    log.events.clear()
    return model, log, model.finalize_backward(async_op=True)


@pytest.mark.parametrize("then", ["wait", "forward", "step", "again"])
@pytest.mark.parametrize("verb", ["fully_shard", "replicate"])
def test_the_end_of_backward_is_launched_and_lands_later(pool: Pool, verb: str, then: str) -> None:
    pool.run(2, _end_later, verb, then)


def _end_later(verb: str, then: str) -> None:
    plain = _finalized(verb)[0]
    reduce_gradients(plain)
    model, log, handle = _finalized(verb)
    assert log.labels("launch")
    assert not log.labels("wait")
    if then == "forward":
        model(_batch())
    elif then == "step":
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    elif then == "again":
        model.finalize_backward()
    else:
        handle.wait()
    assert len(log.labels("wait")) >= len(set(log.labels("launch")))
    for name, expected in full_gradients(plain).items():
        torch.testing.assert_close(full_gradients(model)[name], expected)
    handle.wait()


@spmd(ranks=2)
def test_what_torchs_pipelines_read_of_the_state_reduces() -> None:
    outcomes = []
    for by_state in (False, True):
        model = _sharded()
        model.set_requires_gradient_sync(not by_state)
        model.set_reshard_after_backward(not by_state)
        model(_batch()).square().sum().backward()
        if by_state:
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
            state = fully_shard.state(model)  # type: ignore[attr-defined]
            assert len(state._state_ctx.all_states) == 3
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        outcomes.append(full_gradients(model))
    for name, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], expected)
    assert fully_shard.state(nn.Linear(1, 1)) is None  # type: ignore[attr-defined]


# --- what is refused -----------------------------------------------------------------------------


@spmd(ranks=2)
def test_what_is_not_supported_is_refused_by_name() -> None:
    model = _sharded()
    for name in (
        "set_all_reduce_hook",
        "set_keep_unsharded_storage",
    ):
        with pytest.raises(UnsupportedError, match=rf"^{name}\(\) of FSDP2 is not supported"):
            getattr(model, name)(None)
    with pytest.raises(MeshError, match="dp_mesh_dims names dimensions of mesh="):
        fully_shard(_layers(), dp_mesh_dims=object())
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(AnnotationError, match=rf"^{name} takes an object with allocate\(\)"):
            getattr(model, name)(dist.all_reduce)
    with pytest.raises(MeshError, match="and the backend of its process group for cpu is gloo"):
        model.set_symm_mem_for_comm()
    with pytest.raises(UnsupportedError, match="backend='NVSHMEM', and there is NCCL only"):
        model.set_symm_mem_for_comm("NVSHMEM")
    custom = type("Custom", (), {"allocate": torch.empty, "__call__": dist.all_reduce})()
    mesh = init_device_mesh(current_device().type, (2, 1), mesh_dim_names=("all", "one"))
    mixed: Any = fully_shard(
        _layers(),
        mesh=mesh["all"],
        shard_placement_fn=lambda p: (Shard(0), mesh["one"]) if p.ndim == 1 else None,
    )
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(
            UnsupportedError, match=r"of unit '\(root\)' are on meshes of their own"
        ):
            getattr(mixed, name)(custom)
    loss = model(_batch()).sum()
    with pytest.raises(PhaseError, match=r"^the communication of unit '\(root\)' was changed"):
        model.set_custom_all_gather(custom)
    loss.backward()
    with pytest.raises(AnnotationError, match="True or False, got 2"):
        model.set_reshard_after_forward(2)
    with pytest.raises(AnnotationError, match="positive number that is not infinite, got 0"):
        model.set_gradient_divide_factor(0)


@spmd(ranks=2)
def test_memory_and_gathers_follow_reshard_after_forward_between_steps() -> None:
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        model = _sharded(reshard_after_forward=True)
        groups = [group for handle in composable.traversal.get_handles(model) for group in handle]
        for after in (True, False, True):
            model.set_reshard_after_forward(after)
            log.events.clear()
            loss = model(_batch()).sum()
            held = [buffer.held for group in groups for buffer in group.gather.buffers]
            assert any(held) is not after
            assert all(held) is not after
            loss.backward()
            gathers = [label for label in log.labels() if label.startswith("all-gather of unit")]
            assert len(gathers) == len(groups) * (2 if after else 1)
            assert not any(buffer.held for group in groups for buffer in group.gather.buffers)


@pytest.mark.parametrize("after", [False, True])
@spmd(ranks=2)
def test_parameters_that_are_kept_after_backward_are_gathered_once_per_accumulation(
    after: bool,
) -> None:
    log = Log()
    with comms_wrapped_by(lambda comm: Recording(comm, log)):
        model = _sharded(reshard_after_forward=after)
    groups = [group for handle in composable.traversal.get_handles(model) for group in handle]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        gathers = []
        for number in range(3):
            last = number == 2
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            log.events.clear()
            model(_batch(number)).sum().backward()
            labels = log.labels()
            gathers.append(sum(label.startswith("all-gather of unit") for label in labels))
            assert any(group.gather.buffers[0].held for group in groups) is not last
        assert gathers == [len(groups), 0, 0]
        optimizer.step()
        optimizer.zero_grad()


@spmd(ranks=2)
def test_methods_refuse_a_module_that_is_not_annotated() -> None:
    model = _sharded()
    arguments = {"set_reshard_after_forward": (True,), "set_gradient_divide_factor": (2,)}
    for name in NAMES:
        given = arguments.get(name, tuple(_usual(each) for each in _needed(name)))
        for other in (model[1], nn.Linear(1, 1)):  # below an annotated one, and elsewhere
            with pytest.raises(NotAnnotatedError, match=f"^{name}"):
                getattr(FSDPModule, name)(other, *given)
    with pytest.raises(NotAnnotatedError, match="share_comm_ctx"):
        share_comm_ctx([model, nn.Linear(1, 1)])
    with pytest.raises(NotAnnotatedError, match="set_modules_to_forward_prefetch"):
        model.set_modules_to_forward_prefetch([model[1]])
    with pytest.raises(NotAnnotatedError, match="no method 'generate'"):
        register_fsdp_forward_method(model, "generate")


def _needed(name: str) -> list[inspect.Parameter]:
    parameters = inspect.signature(getattr(FSDPModule, name)).parameters.values()
    takes = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters if p.kind in takes and p.default is p.empty][1:]


def _usual(parameter: inspect.Parameter) -> object:
    return () if "Sequence" in parameter.annotation else 1  # a flag, a number, an object


@spmd(ranks=2)
def test_a_divisor_in_the_middle_of_a_step_is_refused_and_changes_nothing() -> None:
    model = _sharded()
    loss = model(_batch()).square().sum()
    said = refusal(lambda: model.set_gradient_divide_factor(1))
    assert said.startswith("PhaseError: the divisor of gradients of unit '(root)' was set in the")
    loss.backward()
    before = full_gradients(model)
    model.zero_grad()
    with no_sync(model):
        model(_batch()).square().sum().backward()
    for unit in (model[0], model[3]):
        with pytest.raises(PhaseError, match="with accumulated gradients"):
            unit.set_gradient_divide_factor(1)
    model.synchronize_gradients()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, before[name])
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    with whole(model):  # whole parameters do not matter to it
        model[3].set_gradient_divide_factor(1)  # nothing waits: the unit of the list sums
    model.set_requires_gradient_sync(True)
    model(_batch()).square().sum().backward()
    for name, gradient in full_gradients(model).items():
        expected = before[name]
        assert expected is not None
        torch.testing.assert_close(gradient, expected * (1 if name[0] == "0" else 2))


@pytest.mark.beyond_sim("FSDP2 does not know the device")
@spmd(ranks=2)
def test_a_model_that_fsdp2_has_sharded_in_part_is_refused_and_stays_as_it_is() -> None:
    below, on, around = _layers(), _layers(), _layers()
    fsdp.fully_shard(below[0])
    fsdp.fully_shard(on)
    fsdp.fully_shard(around)
    cases: list[tuple[nn.Module, nn.Module, str]] = [
        (below, below, "ClashError: fully_shard: '0' is managed by torch's fully_shard already"),
        (on, on, "ClashError: fully_shard: the module is managed by torch's fully_shard already"),
        (around, around[2], "AnnotationError: parameter '2.weight' is a DTensor already"),
    ]
    for model, module, message in cases:
        before = anatomy(model)
        assert refusal(lambda module=module: fully_shard(module)).startswith(message)
        assert anatomy(model) == before
    # apart from each other the two work
    whole = _layers()
    fsdp.fully_shard(whole[0])
    fully_shard(whole[2])
    whole[2](whole[0](_batch())).sum().backward()
    assert {type(whole[n].weight.grad) for n in (0, 2)} == {DTensor}


@spmd(ranks=2)
def test_only_the_outermost_module_resets_a_step() -> None:
    model = _sharded()
    model(_batch())
    with pytest.raises(PhaseError, match="call it on the outermost"):
        model[0].reset_iter_state()
    model.reset_iter_state()


@spmd(ranks=2)
def test_units_that_are_reduced_in_part_cannot_be_finalized() -> None:
    model = _sharded()
    model.set_manual_backward_finalization(True)
    model[0].set_requires_gradient_sync(False)
    model(_batch()).sum().backward()
    with pytest.raises(PhaseError, match="of unit '0' are to be accumulated"):
        model.finalize_backward()
    model[0].set_requires_gradient_sync(True)
    model.finalize_backward()
    assert str(model[0].weight.grad.placements) == "(Shard(dim=0),)"


@spmd(ranks=2)
def test_a_parameter_that_is_ignored_stays_plain() -> None:
    model = _layers()
    fully_shard(model, ignored_params={model[0].weight})
    assert type(model[0].weight) is nn.Parameter
    before = full_parameters(model)
    torch.testing.assert_close(before["3.weight"].cpu(), _layers()[3].weight.detach())
