"""What one rank does by itself between steps: the table that tests and generated programs draw
from; knows no verb's options and no test.

An event is a generator. All ranks run it; where it yields, all ranks train, and what it does in
between, only the rank that acts does, or each rank does otherwise. No event sends a message, apart
from scopes, which all ranks open together. Training must go on as in one process.
"""

from __future__ import annotations

import copy
import gc
import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from composable import describe, keep_unsharded, reshard, summon_full_params, unshard

# What a model consists of.
SHARDS: Final = "shards"  # all units are sharded
REPLICAS: Final = "replicas"  # all are replicated
MIXED: Final = "mixed"
ANY: Final = (SHARDS, REPLICAS, MIXED)
GATHERED: Final = (SHARDS, MIXED)  # forwards need a message, apart from those in scopes


@dataclass
class Scene:
    """A model as one rank sees it.

    Attributes:
        model: annotated, or it contains annotated modules.
        acts: whether this rank is the one that does something.
        calls: forwards of the model in several orders, or of units in it. Where nothing has to be
            gathered, they send no message.
        parts: forwards of modules whose parameters belong to a unit around them, or to one beside
            them.
        draw: another one on each rank.
        optimizer: of the model.
    """

    model: nn.Module
    acts: bool
    calls: Sequence[Callable[[nn.Module], object]]
    parts: Sequence[Callable[[nn.Module], object]]
    draw: random.Random
    optimizer: torch.optim.Optimizer

    def run(self, *, parts: bool = True) -> None:
        """Some forwards, in any order, and as often as this rank likes."""
        calls = [*self.calls, *(self.parts if parts else ())]
        for call in self.draw.choices(calls, k=self.draw.randint(1, 6)):
            call(self.model)

    def _modules(self) -> list[nn.Module]:
        """Those that can have one more child: containers would call it."""
        containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        return [each for each in self.model.modules() if not isinstance(each, containers)]

    def top(self) -> nn.Module:
        return self._modules()[0]

    def module(self) -> nn.Module:
        return self.draw.choice(self._modules())


Event = Callable[[Scene], Iterator[None]]

# Events in which a step ends while modules hold what they compute with.
_SHOWN_IN_A_STEP: Final = (
    "a_step_between_orders_in_a_scope",
    "orders_after_unshard",
    "own_shard_written_after_unshard",
)

# By name: what is done, and the models that it is legal in.
EVENTS: Final[dict[str, tuple[Event, tuple[str, ...]]]] = {}


def _event(*of: str) -> Callable[[Event], Event]:
    def register(event: Event) -> Event:
        EVENTS[event.__name__.strip("_")] = (event, of or ANY)
        return event

    return register


def events_of(
    kind: str,
    *,
    unused: bool = False,
    distributed: bool = False,
    held: bool = False,
    rounded: bool = False,
) -> list[str]:
    """Names of the events that are legal in models of that kind.

    Args:
        unused: steps may leave parameters out. Zeros in place of no gradient are another step then.
        distributed: parameters are tensor-parallel. Torch's anomaly mode has no rule for DTensors.
        held: gradients that are reduced may be there when more come under `no_sync`, which is
            refused of parameters with tensor hooks.
        rounded: modules compute with rounded weights, which a scope shows around a step.
    """
    left_out = [
        *(_SHOWN_IN_A_STEP if rounded else []),
        *(["gradients_set_to_zeros"] if unused else []),
        *(["anomaly mode"] if distributed else []),
        *(["tensor_hooks_of_parameters"] if held else []),
    ]
    return [name for name, (_, of) in EVENTS.items() if kind in of and name not in left_out]


def perform(name: str, scene: Scene) -> Iterator[None]:
    """Do the event; where this yields, train a step on all ranks."""
    return EVENTS[name][0](scene)


# --- modules and hooks --------------------------------------------------------------------------


@_event()
def _metric(scene: Scene) -> Iterator[None]:
    """A child module without parameters is added and removed."""
    holders = [scene.top(), scene.module()]
    for number, holder in enumerate(holders if scene.acts else ()):
        holder.add_module(f"metric{number}", nn.Identity())
    yield
    yield
    for number, holder in enumerate(holders if scene.acts else ()):
        delattr(holder, f"metric{number}")
    yield


@_event()
def _replaced_module(scene: Scene) -> Iterator[None]:
    """Modules without parameters are replaced by equal ones."""
    for parent in list(scene.model.modules()) if scene.acts else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.GELU | nn.Dropout | nn.Identity):
                setattr(parent, name, copy.deepcopy(child))
    yield


@_event()
def _replaced_container(scene: Scene) -> Iterator[None]:
    """A list of modules is made anew of the same modules."""
    for parent in list(scene.model.modules()) if scene.acts else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList):
                setattr(parent, name, nn.ModuleList(child))
    yield


def _hooks(scene: Scene) -> Iterator[Any]:
    for module in [scene.top(), *(scene.module() for _ in range(3))]:
        yield module.register_forward_pre_hook(lambda *_: None)
        yield module.register_forward_hook(lambda *_: None)
        yield module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)


@_event()
def _forward_hooks(scene: Scene) -> Iterator[None]:
    handles = list(_hooks(scene)) if scene.acts else []
    yield
    yield
    for handle in handles:
        handle.remove()
    yield


@_event()
def _backward_hooks(scene: Scene) -> Iterator[None]:
    modules = [module for module in scene.model.modules() if isinstance(module, nn.Linear)]
    handles = []
    for module in modules if scene.acts else ():
        handles.append(module.register_full_backward_hook(lambda *_: None))
        handles.append(module.register_full_backward_pre_hook(lambda *_: None))
    with warnings.catch_warnings():  # torch warns where inputs need no gradient
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield
    for handle in handles:
        handle.remove()
    yield


@_event()
def _hooks_of_all_modules(scene: Scene) -> Iterator[None]:
    """As profilers and loggers of a process have them."""
    hooks = torch.nn.modules.module
    handles = []
    if scene.acts:
        handles.append(hooks.register_module_forward_pre_hook(lambda *_: None))
        handles.append(hooks.register_module_forward_hook(lambda *_: None))
    yield
    for handle in handles:
        handle.remove()
    yield


def _hooks_of_parameters(name: str) -> Event:
    def event(scene: Scene) -> Iterator[None]:
        """As they measure gradients."""
        trained = [each for each in _all_parameters(scene) if each.requires_grad and scene.acts]
        handles = [getattr(parameter, name)(lambda _: None) for parameter in trained]
        yield
        for handle in handles:
            handle.remove()
        yield

    return event


EVENTS["tensor_hooks_of_parameters"] = _hooks_of_parameters("register_hook"), ANY
EVENTS["hooks_after_accumulation"] = (
    _hooks_of_parameters("register_post_accumulate_grad_hook"),
    ANY,
)


# --- buffers ------------------------------------------------------------------------------------


@_event(SHARDS)
def _new_buffer(scene: Scene) -> Iterator[None]:
    """Where no unit is replicated: buffers of those follow rank 0, so all ranks must have them."""
    module = scene.module()
    if scene.acts:
        module.register_buffer("count", torch.zeros(3))
    yield
    if scene.acts:
        del module.count
    yield


@_event()
def _moved_buffers(scene: Scene) -> Iterator[None]:
    for module in scene.model.modules() if scene.acts else ():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())
    yield


# --- memory -------------------------------------------------------------------------------------


def _all_parameters(scene: Scene) -> list[nn.Parameter]:
    return list(scene.model.parameters())


@_event()
def _moved_parameters(scene: Scene) -> Iterator[None]:
    for parameter in _all_parameters(scene) if scene.acts else ():
        parameter.data = parameter.data.clone()
    yield


@_event()
def _one_moved_parameter(scene: Scene) -> Iterator[None]:
    if scene.acts:
        parameter = scene.draw.choice(_all_parameters(scene))
        parameter.data = parameter.data.clone()
    yield


@_event()
def _moved_to_the_host_and_back(scene: Scene) -> Iterator[None]:
    for parameter in _all_parameters(scene) if scene.acts else ():
        device = parameter.device
        parameter.data = parameter.data.to("cpu", copy=True)
        parameter.data = parameter.data.to(device)
    yield


@_event()
def _applied(scene: Scene) -> Iterator[None]:
    """What `model.cpu()` and `model.to(...)` call, with memory that is new."""
    if scene.acts:
        scene.model._apply(lambda tensor: tensor.clone())
    yield


@_event()
def _swapped_in_and_back(scene: Scene) -> Iterator[None]:
    """As the weights of an average are for a while."""
    kept = [parameter.data for parameter in _all_parameters(scene)]
    for parameter, data in zip(_all_parameters(scene), kept, strict=True):
        if scene.acts:
            parameter.data = data.clone()
    if scene.acts:
        scene.model.state_dict()
        for parameter, data in zip(_all_parameters(scene), kept, strict=True):
            parameter.data = data
    yield


@_event(REPLICAS)
def _swapped_in_evaluated_and_back(scene: Scene) -> Iterator[None]:
    kept = [parameter.data for parameter in _all_parameters(scene)]
    if scene.acts:
        for parameter, data in zip(_all_parameters(scene), kept, strict=True):
            parameter.data = data.clone()
        with torch.no_grad():
            scene.calls[0](scene.model)
        for parameter, data in zip(_all_parameters(scene), kept, strict=True):
            parameter.data = data
    yield


@_event()
def _equal_writes(scene: Scene) -> Iterator[None]:
    with torch.no_grad():
        for parameter in _all_parameters(scene) if scene.acts else ():
            parameter.copy_(parameter.clone())
    yield


@_event()
def _collected_garbage(scene: Scene) -> Iterator[None]:
    if scene.acts:
        gc.collect()
    yield


# --- state --------------------------------------------------------------------------------------


@_event()
def _looks(scene: Scene) -> Iterator[None]:
    if scene.acts:
        describe(scene.model)
        repr(scene.model)
        scene.model.state_dict()
        scene.optimizer.state_dict()
    yield


@_event()
def _saved(scene: Scene) -> Iterator[None]:
    """Of shards each rank saves its own."""
    if scene.acts:
        local = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in scene.model.state_dict().items()
        }
        torch.save(local, io.BytesIO())
    yield


@_event()
def _loaded_again(scene: Scene) -> Iterator[None]:
    if scene.acts:
        scene.model.load_state_dict(copy.deepcopy(scene.model.state_dict()))
    yield


@_event()
def _optimizer_loaded_again(scene: Scene) -> Iterator[None]:
    if scene.acts:
        scene.optimizer.load_state_dict(copy.deepcopy(scene.optimizer.state_dict()))
    yield


@_event()
def _copied(scene: Scene) -> Iterator[None]:
    made = copy.deepcopy(scene.model) if scene.acts else None
    yield
    del made
    yield


@_event(REPLICAS)
def _copied_and_evaluated(scene: Scene) -> Iterator[None]:
    if scene.acts:
        made = copy.deepcopy(scene.model)
        with torch.no_grad():
            for call in scene.calls:
                call(made)
            for parameter in made.parameters():
                parameter.zero_()
    yield


@_event()
def _gradients_set_to_zeros(scene: Scene) -> Iterator[None]:
    """As `zero_grad(set_to_none=False)` leaves them, where another rank has none."""
    yield
    for parameter in _all_parameters(scene) if scene.acts else ():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    yield
    if scene.acts:
        scene.optimizer.zero_grad()
    yield


@_event()
def _eval_mode(scene: Scene) -> Iterator[None]:
    scene.model.train(not scene.acts)
    yield
    scene.model.train()
    yield


# --- steps that are watched ---------------------------------------------------------------------


def _watched(scope: Callable[[], AbstractContextManager[Any]]) -> Event:
    def event(scene: Scene) -> Iterator[None]:
        with ExitStack() as stack:
            if scene.acts:
                stack.enter_context(scope())
            yield
        yield

    return event


_WATCHES: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "flop counter": lambda: FlopCounterMode(display=False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same),
}
EVENTS.update({name: (_watched(scope), ANY) for name, scope in _WATCHES.items()})


def _same(tensor: Tensor) -> Tensor:
    return tensor


# --- evaluation ---------------------------------------------------------------------------------


@_event(REPLICAS)
def _evaluated(scene: Scene) -> Iterator[None]:
    with torch.no_grad():
        scene.model.eval()
        scene.run()
        scene.model.train()
    yield


@_event(REPLICAS)
def _evaluated_in_inference_mode(scene: Scene) -> Iterator[None]:
    with torch.inference_mode():
        scene.run()
    yield


class _Lost(Exception):
    """What an evaluation raises."""


def _lose(*_: object) -> None:
    raise _Lost


def _fail_somewhere(scene: Scene) -> None:
    """An evaluation that raises in the middle; the caller catches it."""
    handle = scene.module().register_forward_hook(_lose)
    try:
        for call in scene.calls:
            call(scene.model)
    except _Lost:
        pass
    finally:
        handle.remove()


@_event(REPLICAS)
def _failed_evaluation(scene: Scene) -> Iterator[None]:
    if scene.acts:
        with torch.no_grad():
            _fail_somewhere(scene)
    yield


# --- scopes that all ranks open, in which each does what it likes ---------------------------------


@_event(*GATHERED)
def _orders_in_keep_unsharded(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model), torch.no_grad():
        scene.run()
    yield


@_event(*GATHERED)
def _one_rank_in_keep_unsharded(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model), torch.no_grad():
        for call in reversed(scene.calls) if scene.acts else ():
            call(scene.model)
    yield


@_event(*GATHERED)
def _inference_in_keep_unsharded(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model), torch.inference_mode():
        scene.run()
    yield


@_event(*GATHERED)
def _failed_evaluation_in_keep_unsharded(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model), torch.no_grad():
        if scene.acts:
            _fail_somewhere(scene)
        scene.run()
    yield


@_event(*GATHERED)
def _scope_left_by_an_exception(scene: Scene) -> Iterator[None]:
    """On all ranks, each of which has done something else before."""
    try:
        with keep_unsharded(scene.model), torch.no_grad():
            scene.run()
            raise _Lost
    except _Lost:
        pass
    yield


@_event(*GATHERED)
def _nested_scopes(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model), torch.no_grad():
        scene.run()
        with keep_unsharded(scene.model):
            scene.run()
        scene.run()
    yield


@_event(*GATHERED)
def _a_step_between_orders_in_a_scope(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model):
        with torch.no_grad():
            scene.run()
        yield
        with torch.no_grad():  # from a forward with gradients on, units show their own alone
            scene.run(parts=False)
    yield


@_event(*GATHERED)
def _orders_between_unshard_and_reshard(scene: Scene) -> Iterator[None]:
    unshard(scene.model)
    with torch.no_grad():
        scene.run()
    reshard(scene.model)
    yield


@_event(*GATHERED)
def _orders_after_unshard(scene: Scene) -> Iterator[None]:
    """The step after them uses what was gathered."""
    unshard(scene.model, async_op=True).wait()
    with torch.no_grad():
        scene.run()
    yield
    reshard(scene.model)  # what one rank loads after this is its own
    yield


@_event(*GATHERED)
def _own_shard_written_after_unshard(scene: Scene) -> Iterator[None]:
    parameters = _all_parameters(scene)
    unshard(scene.model)
    with torch.no_grad():
        for parameter in parameters if scene.acts else ():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            before = local.clone()
            local.zero_()
            local.copy_(before)
    yield
    reshard(scene.model)
    yield


@_event(*GATHERED)
def _own_shard_written_in_keep_unsharded(scene: Scene) -> Iterator[None]:
    parameters = _all_parameters(scene)
    with keep_unsharded(scene.model), torch.no_grad():
        scene.run()
        for parameter in parameters if scene.acts else ():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local.clone())
    yield


@_event()
def _reads_in_unsharded(scene: Scene) -> Iterator[None]:
    with summon_full_params(scene.model, writeback=False), torch.no_grad():
        if scene.acts:
            sum(parameter.sum() for parameter in scene.model.parameters())
            scene.model.state_dict()
    yield
