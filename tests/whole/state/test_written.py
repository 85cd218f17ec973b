"""Calls of the library that write to parameters while these are kept unsharded.

The table is made from `composable.__all__`: a public name that is in none of its parts fails until
it is entered. Each call is made in scopes that keep parameters, and in none. Forwards there and
behind compute with what was written, modules hold what they held, and nobody is notified of a
write of one rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import composable
from composable import fully_shard, keep_unsharded
from composable.fsdp2 import FSDPModule
from tests.helpers.logged import logged
from tests.helpers.world import current_device, spmd


class Scene:
    """A model of two units, and what one process computes with its values.

    Attributes:
        rest: its parameters at rest, as users had them before a scope.
        trained: a forward with gradients has run, from which on modules hold whole parameters in
            forwards of their units only.
    """

    def __init__(self, layout: str) -> None:
        device, ranks = current_device(), dist.get_world_size()
        self.replicas = 1 if layout == "shards" else 2
        mesh = init_device_mesh(
            device.type,
            (self.replicas, ranks // self.replicas),
            mesh_dim_names=("replicate", "shard"),
        )
        self.replica = mesh.get_coordinate()[0]  # type: ignore[index]
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + number)
        fully_shard(self.model[0], mesh=mesh, mp_policy="bf16")  # replicas alone gather casts
        fully_shard(self.model, mesh=mesh, mp_policy="bf16")
        self.rest = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.rest, lr=0.5)
        self.x = torch.ones(2, 4, device=device)
        self.trained = False
        self.undo: list[Callable[[], object]] = []

    def see(self, *, grad: bool = False) -> Tensor:
        """What forwards compute; without gradients also of a module that is not annotated."""
        with torch.set_grad_enabled(grad):
            return self.model(self.x).detach()

    def train(self) -> None:
        """Bring gradients."""
        self.trained = True
        with torch.enable_grad():
            self.model(self.x).float().sum().backward()

    def change(self) -> None:
        """Write by an operator to what rests, on all ranks alike; forwards see it."""
        with torch.no_grad():
            for parameter in self.rest:
                parameter.mul_(2.0)
        self.see()

    def differ(self) -> None:
        """Let replicas have other values, by an operator on what rests."""
        with torch.no_grad():
            for parameter in self.rest:
                parameter.mul_(1 + 2 * self.replica)
        self.see()

    def whole(self) -> dict[str, Tensor]:
        return composable.full_state_dict(self.model, rank0_only=False)

    def expected(self) -> Tensor:
        """What one process computes with the values of now."""
        plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        plain.load_state_dict(self.whole())
        plain.to(self.x.device, torch.bfloat16)
        return plain(self.x.to(torch.bfloat16)).detach()


def _folder() -> Path:
    """A new one, which all ranks know."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    return Path(path[0]) / "saved"


# --- calls that write --------------------------------------------------------------------------


def _ema(scene: Scene) -> None:
    ema = composable.EMA(scene.model, decay=0.5)
    with torch.no_grad():
        for parameter in scene.rest:
            parameter.mul_(3.0)
    ema.update()
    scene.see()
    scopes = ExitStack()
    scopes.enter_context(ema.swap())
    scene.undo.append(scopes.close)


def _average(scene: Scene) -> None:
    scene.differ()
    composable.average_parameters(scene.model)


def _periodic(scene: Scene) -> None:
    scene.differ()
    composable.PeriodicAverager(scene.model, period=1).average_parameters()


def _hierarchical(scene: Scene) -> None:
    scene.differ()
    composable.HierarchicalAverager(scene.model, periods={2: 1}).average_parameters()


def _local_steps(scene: Scene) -> None:
    scene.optimizer.zero_grad()
    with composable.local_steps(scene.model, scene.optimizer, every=1):
        scene.train()
        scene.optimizer.step()


def _in_backward(scene: Scene) -> None:
    optimizer = composable.apply_optimizer_in_backward(torch.optim.SGD, scene.rest, {"lr": 0.5})
    scene.train()
    optimizer.remove()


def _load(scene: Scene) -> None:
    folder = _folder()
    composable.export(scene.model, folder)
    scene.change()
    composable.load(scene.model, folder)


def _materialize(scene: Scene) -> None:
    folder = _folder()
    composable.export(scene.model, folder)
    scene.change()
    composable.materialize(scene.model, folder=folder)


def _refresh(scene: Scene) -> None:
    with torch.no_grad():
        for parameter in scene.rest:
            parameter.mul_(2.0)
    composable.refresh(scene.model)


def _offload(scene: Scene) -> None:
    with torch.no_grad():
        for parameter in scene.rest:
            parameter.mul_(2.0)
    with composable.offload_to_host(scene.model, scene.optimizer):
        pass


def _on_matrices(scene: Scene) -> None:
    scene.train()
    composable.step_on_matrices(torch.optim.SGD(scene.rest, lr=0.5)).step()


def _on_shards(scene: Scene) -> None:
    scene.train()
    composable.step_on_shards(scene.optimizer)
    scene.optimizer.step()


def _clipped(scene: Scene) -> None:
    scene.train()
    composable.clip_grad_norm_(scene.model, 100.0)
    scene.optimizer.step()


def _rebound(scene: Scene) -> None:
    composable.rebind_optimizer(scene.model, scene.optimizer)
    scene.train()
    scene.optimizer.step()


def _joined(scene: Scene) -> None:
    with composable.join(scene.model, scene.optimizer):
        scene.train()
        scene.optimizer.step()


def _together(scene: Scene) -> None:
    with composable.together(scene.model) as step:
        scene.train()
    assert not step.lost
    scene.optimizer.step()


def _watched(scene: Scene) -> None:
    with composable.watch(scene.model, every=1):
        scene.train()
        scene.optimizer.step()


def _accumulated(scene: Scene) -> None:
    with composable.no_sync(scene.model):
        scene.train()
    composable.reduce_gradients(scene.model)
    scene.optimizer.step()


def _edited(scene: Scene) -> None:
    with composable.summon_full_params(scene.model), torch.no_grad():
        for parameter in scene.model.parameters():
            parameter.mul_(2.0)


def _edited_on_rank_0(scene: Scene) -> None:
    with composable.summon_full_params(scene.model, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            for parameter in scene.model.parameters():
                parameter.mul_(2.0)


def _reset(scene: Scene) -> None:
    scene.train()
    scene.optimizer.step()
    composable.reset(scene.model)


WRITES: Final[dict[str, Callable[[Scene], None]]] = {
    "EMA": _ema,
    "HierarchicalAverager": _hierarchical,
    "HostOffload": _offload,
    "LocalSteps": _local_steps,
    "OptimizerInBackward": _in_backward,
    "PeriodicAverager": _periodic,
    "apply_optimizer_in_backward": _in_backward,
    "average_parameters": _average,
    "clip_grad_norm_": _clipped,
    "join": _joined,
    "load": _load,
    "local_steps": _local_steps,
    "materialize": _materialize,
    "no_sync": _accumulated,
    "offload_to_host": _offload,
    "rebind_optimizer": _rebound,
    "reduce_gradients": _accumulated,
    "refresh": _refresh,
    "reset": _reset,
    "step_on_matrices": _on_matrices,
    "step_on_shards": _on_shards,
    "together": _together,
    "summon_full_params": _edited,
    "watch": _watched,
}


# --- calls that users make of torch ------------------------------------------------------------


def _by_an_operator(scene: Scene) -> None:
    with torch.no_grad():
        for parameter in scene.rest:
            parameter.mul_(2.0)


def _by_loading(scene: Scene) -> None:
    scene.model.load_state_dict({name: value * 2 for name, value in scene.whole().items()})


def _by_loading_a_part(scene: Scene) -> None:
    part = {name[2:]: value * 2 for name, value in scene.whole().items() if name[0] == "2"}
    scene.model[2].load_state_dict(part)


def _by_checkpoint(scene: Scene) -> None:
    folder = str(_folder())
    dcp.save({"model": get_model_state_dict(scene.model)}, checkpoint_id=folder)
    scene.change()
    state = {"model": get_model_state_dict(scene.model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(scene.model, state["model"])


def _by_an_optimizer(scene: Scene) -> None:
    scene.train()
    scene.optimizer.step()


OF_TORCH: Final[dict[str, Callable[[Scene], None]]] = {
    "an operator": _by_an_operator,
    "an optimizer": _by_an_optimizer,
    "load_state_dict": _by_loading,
    "load_state_dict of a part": _by_loading_a_part,
    "distributed checkpoint": _by_checkpoint,
}


# --- calls that do not write -------------------------------------------------------------------


def _saved(scene: Scene) -> None:
    composable.export(scene.model, _folder())


def _streamed(scene: Scene) -> None:
    for _ in composable.stream_full(scene.model):
        pass


def _averaged(scene: Scene) -> None:
    composable.EMA(scene.model, decay=0.5).update()


def _kept(scene: Scene) -> None:
    with keep_unsharded(scene.model):
        scene.see()


def _looked_at(scene: Scene) -> None:
    with composable.summon_full_params(scene.model, writeback=False):
        assert type(scene.model[0].weight) is nn.Parameter


READS: Final[dict[str, Callable[[Scene], object]]] = {
    "describe": lambda scene: composable.describe(scene.model).to_dict(),
    "export": _saved,
    "full_state_dict": Scene.whole,
    "keep_unsharded": _kept,
    "registry": lambda scene: composable.registry(scene.model),
    "stream_full": _streamed,
    "traversal": lambda scene: composable.traversal.get_handles(scene.model),
    "Watch": lambda scene: composable.watch(scene.model).remove(),
}
READS_OF_OTHERS: Final[dict[str, Callable[[Scene], object]]] = {
    "EMA.update": _averaged,
    "state_dict": lambda scene: scene.model.state_dict(),
    "summon_full_params(writeback=False)": _looked_at,
}

# --- neither: no calls, or ones that change annotations, scopes and hooks ------------------------

NEITHER: Final = [
    *("CPUOffloadPolicy", "CustomPolicy", "MixedPrecisionPolicy", "ModelPolicy"),
    *("ModuleWrapPolicy", "NamePolicy", "Policy", "SizePolicy", "Streamed"),
    *("__version__", "errors"),
    *("apply_tp_plan", "checkpoint", "contract", "declare_part", "fully_shard", "on_undo"),
    *("offload_activations", "remove", "replicate"),
    *("joinable", "register_comm_hook", "register_forward_method", "skipped"),
    *("reshard", "unshard"),  # they end and begin what is kept
]


def test_every_public_name_is_entered() -> None:
    entered = [*WRITES, *READS, *NEITHER]
    assert sorted(entered) == sorted(composable.__all__), (
        "say in this file whether a call of a new name writes to parameters"
    )


@contextmanager
def _nothing(scene: Scene) -> Iterator[None]:
    yield


@contextmanager
def _keep_unsharded(scene: Scene) -> Iterator[None]:
    with keep_unsharded(scene.model):
        yield


@contextmanager
def _not_freed_by_backward(scene: Scene) -> Iterator[None]:
    FSDPModule.set_reshard_after_backward(scene.model, False)
    scene.train()
    scene.optimizer.zero_grad()
    yield
    FSDPModule.set_reshard_after_backward(scene.model, True)


SCOPES: Final = {
    "no scope": _nothing,
    "keep_unsharded": _keep_unsharded,
    "set_reshard_after_backward(False)": _not_freed_by_backward,
}


def _is_right(scene: Scene, what: str) -> None:
    expected, close = scene.expected(), {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(scene.see(), expected, **close, msg=lambda text: f"{what}: {text}")
    seen = scene.see(grad=True)
    torch.testing.assert_close(seen, expected, **close, msg=lambda text: f"{what}, grad: {text}")


def _run(program: Callable[[Scene], object], scope: str, layout: str) -> None:
    scene = Scene(layout)
    with logged() as lines:
        with SCOPES[scope](scene):
            scene.see()
            program(scene)
            if program is _by_an_operator:
                scene.see()  # no call says so: units are gathered again as they are called
            if scope == "keep_unsharded" and not scene.trained:  # any module may be called there
                below = scene.model[2]
                assert type(below.weight) is nn.Parameter, "modules hold whole parameters"
                with torch.no_grad():
                    hidden = scene.model[1](scene.model[0](scene.x))
                    torch.testing.assert_close(below(hidden), scene.model(scene.x))
            _is_right(scene, "in the scope")
        _is_right(scene, "behind the scope")
        for undo in scene.undo:
            undo()
            _is_right(scene, "undone")
    assert all(isinstance(parameter, DTensor) for parameter in scene.model.parameters())
    assert not [line for line in lines if "written to" in line]


AVERAGES: Final = (_average, _periodic, _hierarchical, _local_steps)


ALWAYS: Final = [("keep_unsharded", 2, "shards")]
CASES: Final = [
    pytest.param(*case, marks=pytest.mark.unsampled if case in ALWAYS else pytest.mark.in_full_only)
    for case in (
        (scope, ranks, layout)
        for scope in SCOPES
        for ranks, layout in ((2, "shards"), (2, "replicas"), (4, "replicas"))
    )
]


@spmd()
@pytest.mark.parametrize(("scope", "ranks", "layout"), CASES)
def test_forwards_see_what_a_call_has_written_in_any_scope(scope: str, layout: str) -> None:
    for name, program in {**WRITES, **OF_TORCH, **READS, **READS_OF_OTHERS}.items():
        if program in AVERAGES and layout == "shards":
            continue  # there are no replicas
        try:
            _run(program, scope, layout)
        except BaseException as error:
            error.add_note(f"by {name}")
            raise


@spmd(ranks=2)
def test_loading_a_module_twice_in_one_call_shows_whole_parameters_behind_it() -> None:
    torch.manual_seed(0)
    twice, last = nn.Linear(4, 4), nn.Linear(4, 4)
    part = nn.Sequential(twice, last, twice)
    model = nn.Sequential(part, nn.Linear(4, 4)).to(current_device())
    fully_shard(model)
    state = {name: 2 * value for name, value in part.state_dict().items()}
    with torch.no_grad(), keep_unsharded(model):
        part.load_state_dict(state)
        assert not any(isinstance(parameter, DTensor) for parameter in part.parameters())
        assert torch.equal(part[0].weight, state["0.weight"].full_tensor())
