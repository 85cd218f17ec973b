"""Every public function x every argument x a dozen wrong values: one clear error, nothing changed.

The cases are made from signatures. What a value is good for (`_POOL`) is written here by hand, so
that annotations are compared with it, and not with what the library reads in them.
"""

from __future__ import annotations

import inspect
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable
from composable import errors, fsdp2, traversal
from composable.checked import (
    ELSEWHERE,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RealDtype,
    Takes,
    checked,
)

# --- what is called -------------------------------------------------------------------------------

# Made by the library, or torch's own: nobody calls these classes.
_RETURNED = {
    "HostOffload", "LocalSteps", "OptimizerInBackward", "ShardStepping", "Watch", "Policy",
    "Installation", "FSDPModule", "UnshardHandle",
}  # fmt: skip
_METHODS = {
    "EMA": ["load_state_dict"],
    "PeriodicAverager": ["load_state_dict"],
    "HierarchicalAverager": ["load_state_dict"],
    "LocalSteps": ["load_state_dict"],
    # the others have no effect, or take an object of the user's
    "FSDPModule": [
        "unshard", "set_reshard_after_forward", "set_reshard_after_backward",
        "set_requires_gradient_sync", "set_requires_all_reduce", "set_gradient_divide_factor",
        "set_reduce_scatter_divide_factor", "set_manual_backward_finalization",
        "finalize_backward", "set_modules_to_forward_prefetch",
        "set_modules_to_backward_prefetch", "set_symm_mem_for_comm",
    ],
}  # fmt: skip


class Target(NamedTuple):
    """A function, and how its arguments are annotated."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    hints: dict[str, Any]


def _target(name: str, function: Callable[..., Any], *, skip: int = 0) -> Target:
    code = inspect.unwrap(function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip:]
    hints = typing.get_type_hints(code, include_extras=True)
    return Target(name, function, signature.replace(parameters=parameters), hints)


def _targets() -> Iterator[Target]:
    for module in (composable, fsdp2, traversal):
        for name in module.__all__:
            value = getattr(module, name)
            label = f"{module.__name__}.{name}"
            if inspect.isclass(value):
                own = value.__module__.startswith("composable")
                if own and name not in _RETURNED:
                    made = _target(label, value.__init__, skip=1)
                    yield made._replace(function=value)
                for method in _METHODS.get(name, ()):
                    yield _target(f"{label}.{method}", getattr(value, method), skip=1)
            elif callable(value):
                yield _target(label, value)


# --- values ---------------------------------------------------------------------------------------


class Block(nn.Linear):
    """A subclass of a module, with a method."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class World:
    """What calls may change."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder / "new"
        self.model = nn.Sequential(Block(), Block())
        names = ("replicate", "shard")
        composable.fully_shard(
            self.model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        )
        self.plain = self.new()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.ema = composable.EMA(self.model, decay=0.9)
        self.averager = composable.PeriodicAverager(self.model, period=2)
        self.mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        # what has one of these kinds, by the names that `_atoms` gives them
        self.pool: dict[str, tuple[Any, set[str]]] = {
            "object": (object(), set()),
            "bytes": (b"bytes", {"iterable of anything"}),
            "None": (None, {"None"}),
            "text": ("text", {"str", "path", "iterable of anything"}),
            "nothing": ("", {"str", "iterable of anything"}),
            "3": (3, {"int", "float", "1..", "0..", "positive"}),
            "0": (0, {"int", "float", "0..", "0..1", "flag"}),
            "-1": (-1, {"int", "float"}),
            "0.5": (0.5, {"float", "0..1", "positive"}),
            "nan": (float("nan"), set()),
            "true": (True, {"bool", "flag"}),
            "module": (nn.ReLU(), {"Module"}),
            "optimizer": (self.optimizer, {"Optimizer"}),
            "dtype": (torch.bfloat16, {"dtype", "real dtype"}),
            "int dtype": (torch.int32, {"dtype"}),
            "function": (lambda *_: None, {"function"}),
            "class": (int, {"function"}),
            "objects": ([object()], {"iterable of anything", "list of anything"}),
            "dict": ({}, {"mapping", "iterable of anything"}),
            "tensor": (torch.ones(2), {"Tensor", "iterable of anything"}),
        }

    def new(self) -> nn.Module:
        return nn.Sequential(Block(), Block())

    def state(self) -> Any:
        """All that a refused call must leave alone."""
        return [self._of(self.model), self._of(self.plain), self._of_optimizer(),
                self.folder.exists(), self.averager.step]  # fmt: skip

    def _of(self, model: nn.Module) -> Any:
        return [
            (
                sorted(map(str, vars(module))),
                [(id(p), p._version, p.requires_grad, *vars(p)) for p in module.parameters(False)],
                [(name, id(record)) for name, record in composable.registry(module).items()],
                [len(value) for value in vars(module).values() if isinstance(value, dict)],
            )
            for module in model.modules()
        ]

    def _of_optimizer(self) -> Any:
        groups = self.optimizer.param_groups
        hooks = [len(v) for v in vars(self.optimizer).values() if isinstance(v, dict)]
        held = [(k, list(map(id, v)) if k == "params" else v) for g in groups for k, v in g.items()]
        return held, hooks, len(self.optimizer.state)

    def right(self, target: Target, parameter: inspect.Parameter) -> Any:
        """A value for an argument that has no default."""
        name, hint = parameter.name, target.hints.get(parameter.name, Any)
        verbs = ("fully_shard", "replicate", "checkpoint", "offload_activations")
        if name in ("module", "model", "root", "model_or_parameters"):
            return self.plain if target.name.endswith(verbs) else self.model
        known = {
            "folder": self.folder, "mesh": self.mesh, "params": list(self.model.parameters()),
            "parameter": nn.Parameter(torch.ones(2)), "placements": [Replicate()],
            "optimizer_class": torch.optim.SGD, "annotation": composable.fully_shard,
            "name": "generate", "method_name": "generate", "modules": [self.model],
            "periods": {1: 2}, "max_norm": 1.0, "decay": 0.5, "patterns": {"0": True},
            "classes": Block, "state_dict": {}, "hook": lambda state, bucket: None,
        }  # fmt: skip
        if name in known:
            return known[name]
        atoms = _atoms(hint)
        return next(v for v, kinds in self.pool.values() if "*" in atoms or kinds & atoms)


# --- annotations ----------------------------------------------------------------------------------

_BY_ALIAS = {
    id(typing.get_args(alias)[1]): kinds
    for alias, kinds in (
        (PositiveInt, {"1.."}),
        (NonNegativeInt, {"0.."}),
        (PositiveFloat, {"positive"}),
        (Fraction, {"0..1"}),
        (RealDtype, {"real dtype"}),
    )
}


def _atoms(hint: Any) -> set[str]:
    """The kinds that an annotation takes; "*" for what functions look at themselves."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.TypeVar):
        return _atoms(hint.__bound__ or Any)
    if origin is Annotated:
        takes = next((each for each in args[1:] if isinstance(each, Takes)), None)
        if takes is ELSEWHERE:
            return {"*"}
        if id(takes) in _BY_ALIAS:
            return _BY_ALIAS[id(takes)]
        return {"flag"} if takes is not None and takes.words == "True or False" else _atoms(args[0])
    if origin in (Union, types.UnionType):
        found = set().union(*map(_atoms, args))
        return found - {"str"} if "path" in found else found
    if origin is Literal:
        return set()
    if origin is type:
        return {"class"}
    kind = origin or hint
    if kind is Any:
        return {"*"}
    if kind in (int, float, str, bool):
        return {kind.__name__} | ({"int"} if kind is float else set())
    if kind in (None, types.NoneType):
        return {"None"}
    if getattr(kind, "_is_protocol", False) and "__call__" in vars(kind):
        return {"function"}
    if kind in (Callable, typing.Callable):
        return {"function"}
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {"mapping"}
    if isinstance(kind, type) and kind in (Iterable, Sequence, list, tuple):
        anything = not args or args[0] is Any
        return {"iterable of anything", "list of anything"} if anything else {"some iterable"}
    named = {nn.Module: "Module", torch.optim.Optimizer: "Optimizer", torch.Tensor: "Tensor",
             torch.dtype: "dtype"}  # fmt: skip
    if kind.__name__ == "PathLike":
        return {"path"}
    return {named.get(kind, kind.__name__)}


# Values of the right kind that are wrong all the same, or wrong kinds that are right.
_TAKEN = {
    # members are looked at when they are read; an empty dict has none
    ("some iterable", "dict"),
}
# Arguments that the function hands on to `composable.fully_shard`, which takes more; and what is
# checked inside of a verb only.
_ELSEWHERE = {
    ("composable.fsdp2.fully_shard", "mp_policy"),
    ("composable.fsdp2.fully_shard", "ignored_params"),
    ("composable.on_undo", "callback"),
}
# Arguments in which anything may stand.
_ANYTHING = {"checksums", "state", "x", "args", "kwargs", "default", "dp_mesh_dims", "others"}


def _is_wrong(atoms: set[str], label: str, kinds: set[str]) -> bool:
    return not atoms & kinds and not any((atom, label) in _TAKEN for atom in atoms)


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield World(tmp_path)
    finally:
        dist.destroy_process_group()


def test_every_wrong_argument_is_one_clear_error_and_changes_nothing(world: World) -> None:
    said, tried = [], 0
    before = world.state()
    for target in _targets():
        parameters = target.signature.parameters.values()
        right = {
            each.name: world.right(target, each)
            for each in parameters
            if each.default is each.empty and each.kind is not each.VAR_POSITIONAL
        }
        own = [world.model] if "FSDPModule" in target.name else []
        own = [world.ema] if target.name.startswith("composable.EMA.") else own
        own = [world.averager] if ".load_state_dict" in target.name and not own else own
        for each in parameters:
            atoms = _atoms(target.hints.get(each.name, Any))
            elsewhere = (target.name, each.name) in _ELSEWHERE
            if each.name in _ANYTHING or atoms == {"*"} or elsewhere:
                continue
            for label, (value, kinds) in world.pool.items():
                if not _is_wrong(atoms, label, kinds):
                    continue
                tried += 1
                if each.kind is each.VAR_POSITIONAL:
                    args, kwargs = [*right.values(), value], {}
                else:
                    args, kwargs = [], {**right, each.name: value}
                case = f"{target.name}({each.name}={label})"
                try:
                    result = target.function(*own, *args, **kwargs)
                    if hasattr(result, "__enter__"):
                        with result:
                            pass
                    said.append(f"{case}: taken")
                except errors.ComposableError as error:
                    if each.name not in str(error) or len(str(error)) > 600:
                        said.append(f"{case}: {type(error).__name__}: {error}")
                except Exception as error:
                    said.append(f"{case}: {type(error).__name__}: {error}")
                if world.state() != before:
                    said.append(f"{case}: something was changed")
                    world.plain = right["module"] = world.new()
                    before = world.state()
    assert not said, f"{len(said)} of {tried}:\n" + "\n".join(said)
    assert tried > 2000


def test_the_nearest_right_arguments_are_taken(world: World) -> None:
    model, optimizer = world.model, world.optimizer
    compiled = torch.compile(model, backend="eager")
    with composable.no_sync(compiled, enabled=np.bool_(True), level="replicate"):
        pass
    for limit in (1, np.float32(1.0), torch.tensor(1.0), float("inf")):
        composable.clip_grad_norm_(model, limit, np.int64(2))
        composable.clip_grad_norm_((p for p in model.parameters()), max_norm=limit)
    composable.watch(module=model, every=np.int64(2), agree=0).remove()
    averager = composable.PeriodicAverager(model, period=np.uint8(1))
    averager.step = 256  # more than the period's type holds
    averager.average_parameters()
    composable.EMA(model, decay=1)
    assert composable.full_state_dict(compiled, dtype=torch.float16, rank0_only=False)
    composable.together(model, give_up_after=np.uint8(2))
    for prefetch, after in ((np.int64(0), True), (1, 1), (2, None)):
        composable.fully_shard(world.new(), prefetch=prefetch, reshard_after_forward=after)
    for given in (True, False):  # `is` decides in a step
        sharded = composable.fully_shard(world.new(), reshard_after_forward=np.bool_(given))
        unit = composable.fully_shard.state(sharded)
        assert unit is not None
        assert unit.spec.reshard_after_forward is given
        fsdp2.FSDPModule.set_reshard_after_forward(sharded, np.bool_(not given))
        assert unit.spec.reshard_after_forward is (not given)
    for ignored in (None, "0.*", ["0.weight"], {*model[0].parameters()}, model[0],
                    nn.Parameter(torch.ones(1)), (p for p in model.parameters())):  # fmt: skip
        new = world.new()
        composable.replicate(new, ignored_params=ignored, bucket_cap_mb=1)
        composable.remove(new, "replicate")
    composable.replicate([Block(), Block()], bucket_cap_mb=np.float16(0.5))
    composable.apply_optimizer_in_backward(
        torch.optim.SGD, world.plain.parameters(), types.MappingProxyType({"lr": 0.1})
    ).remove()
    composable.checkpoint(world.new(), policy=lambda module, more=None: isinstance(module, Block))
    composable.offload_activations(Block(), min_bytes=np.int64(0))
    assert composable.step_on_matrices(optimizer, which=lambda *parameters: False) is optimizer
    for flag in (True, 1, np.bool_(False)):  # as FSDP2
        fsdp2.FSDPModule.set_requires_gradient_sync(model, flag)
    fsdp2.FSDPModule.set_gradient_divide_factor(model, 2)
    fsdp2.register_fsdp_forward_method(model[0], "generate")


def test_an_optimizer_in_a_wrapper_without_hooks_is_not_taken(world: World) -> None:
    class Wrapper(torch.optim.Optimizer):  # as accelerate's
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    before = world.state()
    for call in (composable.rebind_optimizer, composable.local_steps):
        more: dict[str, Any] = {"every": 2} if call is composable.local_steps else {}
        with pytest.raises(errors.ArgumentError, match=r"of a wrapper, .* the one inside"):
            call(world.model, Wrapper(world.optimizer), **more)
    assert world.state() == before


def test_checks_break_no_compiled_graph(world: World) -> None:
    torch.compiler.reset()
    counters.clear()

    @torch.compile(backend="eager", fullgraph=True)
    def count(x: torch.Tensor) -> torch.Tensor:
        return x * len(composable.registry(world.model))

    @torch.compile(backend="eager")
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        with composable.no_sync(world.model, enabled=False, level="replicate"):
            return world.model(x)

    assert count(torch.ones(1)) == 1
    accumulate(torch.ones(2))
    assert not counters["graph_break"]
    torch.compiler.reset()


def test_paths_are_strings_and_what_has_a_path(world: World) -> None:
    pytest.importorskip("safetensors")
    composable.export(world.model, str(world.folder))
    composable.load(world.model, world.folder)


def test_what_is_missing_unknown_or_given_twice_is_said(world: World) -> None:
    model = world.model
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: composable.no_sync(), "no_sync(): missing a required argument: 'module'"),
        (lambda: composable.no_sync(model, enable=True), "did you mean 'enabled'?"),
        (lambda: composable.no_sync(model, True), "no_sync(): too many positional arguments"),
        (lambda: composable.reset(model, module=model), "multiple values for argument 'module'"),
        (lambda: composable.EMA(model), "EMA(): missing a required argument: 'decay'"),
        (lambda: composable.watch(model, action="rais"), "did you mean 'raise'?"),
    ]
    for call, text in calls:
        with pytest.raises(errors.ArgumentError) as refusal:
            call()
        assert text in str(refusal.value)
        assert isinstance(refusal.value, (TypeError, ValueError))


def test_signatures_and_docstrings_are_those_of_the_function() -> None:
    def function(module: nn.Module, *, every: PositiveInt = 1) -> int:
        """Add nothing."""
        return every

    made = checked(function)
    assert inspect.signature(made) == inspect.signature(function)
    assert made.__doc__ == function.__doc__
    assert made.__name__ == "function"
    assert made.__module__ == __name__
    # `untraced` marks the code of one function, not that of all
    assert made.__code__ is not checked(function).__code__
