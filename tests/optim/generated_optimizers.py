"""Generated programs of optimizers of whole matrices, their copies and their checkpoints, each
beside one process that is given the same gradients.

    python -m tests.optim.generated_optimizers --minutes 30 --seed 0
    python -m tests.optim.generated_optimizers --count 1 --seed 4711

A program is an optimizer, tensors of some shapes, a verb, and legs: in each leg a world of some
ranks goes on from the checkpoint of the leg before, steps, takes the optimizer through a copy or a
state dict, steps on, compares parameters and state, and saves.
"""

from __future__ import annotations

import argparse
import copy
import io
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable import fully_shard, replicate, step_on_matrices
from composable.engine.params.param import PLAIN
from composable.errors import OptimizerError
from composable.torch_private import tree_flatten
from tests.helpers.compare import all_full
from tests.helpers.world import Pool

# --- optimizers ----------------------------------------------------------------------------------


class _Own(Optimizer):
    """Looks at whole matrices, kernels as matrices, and at elements of vectors."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = self._update(parameter.grad, self.state[parameter])
                if update.ndim >= 2 and update.numel():
                    flat = update.reshape(len(update), -1)
                    update = (flat / (1 + flat.norm()) @ (flat.t() @ flat)).view_as(update)
                parameter.sub_(update, alpha=group["lr"])

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient


class _Flattening(_Own):
    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        return state["momentum"].mul_(0.9).add_(gradient)  # type: ignore[no-any-return]


class _Factors(_Own):
    """State in lists, dicts, numbers and None; factors of other shapes."""

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"step": 0, "nothing": None, "norm": torch.zeros((), dtype=gradient.dtype)}
            state["of"] = {"mean": torch.zeros_like(gradient), "rate": 0.5}
            state["factors"] = []
            if gradient.ndim >= 2:
                sizes = len(gradient), gradient[:1].numel()
                state["factors"] = [torch.eye(size).to(gradient) for size in sizes]
        state["step"] += 1
        state["of"]["rate"] *= 0.9
        mean = state["of"]["mean"].mul_(0.8).add_(gradient, alpha=state["of"]["rate"])
        if not state["factors"]:
            return mean / state["step"]  # type: ignore[no-any-return]
        flat = gradient.reshape(len(gradient), -1)
        state["norm"] = flat.norm()
        left, right = state["factors"]
        left.add_(flat @ flat.t())
        right.add_(flat.t() @ flat)
        return (left @ mean.reshape(len(mean), -1) @ right).view_as(mean) / (100 + state["norm"])


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class _Tuples(_Own):
    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["pair"] = torch.zeros_like(gradient), torch.ones_like(gradient)
        one, other = state["pair"]
        state["pair"] = one + gradient, other * 0.9
        return state["pair"][0] * state["pair"][1]  # type: ignore[no-any-return]


class _Replacing(_Own):
    """New tensors in new lists in every step."""

    def _update(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        former = state.get("means", [torch.zeros_like(gradient)] * 2)
        state["means"] = [0.5 * former[1] + gradient, former[0] + gradient]
        return state["means"][0]  # type: ignore[no-any-return]


OPTIMIZERS: Final[dict[str, Callable[[Any], Optimizer]]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "Muon": lambda p: optim.Muon(p, lr=0.05),
    "flattening": _Flattening,
    "factors": _Factors,
    "tuples": _Tuples,
    "replacing": _Replacing,
}
SHAPES: Final = [(7, 5), (6, 6), (1, 4), (5, 1), (3, 4, 2), (1, 3, 3), (5, 2, 3), (4, 3, 2, 2),
                 (3, 2, 1, 2), (2, 2, 1, 2, 2), (9,), (1,), (2,), ()]  # fmt: skip
WAYS: Final = ("nothing", "deepcopy", "own state", "own state in a file", "torch", "torch, full",
               "torch, new", "pickle")  # fmt: skip
VERBS: Final = ("fully_shard", "replicate", "hybrid")

# --- one program ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    seed: int
    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    convolutions: bool
    frozen: bool
    tied: bool
    legs: tuple[tuple[int, str, str], ...]  # ranks, verb, way


def program_of(seed: int) -> Program:
    draw = random.Random(seed)
    name = draw.choice([*OPTIMIZERS])
    shapes = [shape for shape in SHAPES if name != "Muon" or len(shape) == 2]
    legs = []
    worlds = draw.choice([(2,), (3,), (4,), (2, 4, 1), (3, 2), (1, 4)])
    # of NAdam, torch loads numbers that it has made float64 into new ones, which are float32
    for ranks in worlds[:1] if name == "NAdam" else worlds:
        verb = draw.choice(VERBS if ranks == 4 else VERBS[:2])
        way = draw.choice(WAYS)
        if name in ("SGD", "factors") and way == "torch, full":
            # torch loads no full state dict without tensors, and leaves out the empty lists of one
            way = "torch"
        legs.append((ranks, verb, way))
    return Program(
        seed,
        name,
        tuple(draw.sample(shapes, draw.randint(1, min(6, len(shapes))))),
        name != "Muon" and draw.random() < 0.4,
        draw.random() < 0.2,
        draw.random() < 0.2,
        tuple(legs),
    )


class _Part(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64) / 2)

    def forward(self) -> None:
        """Not called: gradients are given."""


class _Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        parts = [_Part(shape) for shape in program.shapes]
        self.parts = nn.ModuleList(parts)
        if program.convolutions:
            self.parts.append(nn.Conv1d(3, 4, 2, dtype=torch.float64))
            self.parts.append(nn.Conv2d(2, 3, 2, dtype=torch.float64))
        if program.frozen and len(parts) > 1:
            parts[-1].weight.requires_grad_(False)
        if program.tied:
            parts[0].tied = parts[0].weight

    def forward(self) -> None:
        """Not called."""


def _is_stack(module: nn.Module, parameter: Tensor) -> bool:
    return parameter.ndim == 3 and not isinstance(module, nn.Conv1d)


class _Beside:
    """A model and its optimizer, and what one process makes of the same gradients."""

    def __init__(self, program: Program, verb: str) -> None:
        self.program = program
        self.model = _Model(program)
        module_of = {
            name: self.model.get_submodule(name.rpartition(".")[0])
            for name, _ in self.model.named_parameters()
        }
        self.plain = {
            name: [
                nn.Parameter(each.detach().clone(), requires_grad=p.requires_grad)
                for each in (p if _is_stack(module_of[name], p) else [p])
            ]
            for name, p in self.model.named_parameters()
        }
        self.stacks = {n for n, p in self.model.named_parameters() if _is_stack(module_of[n], p)}
        self.reference = OPTIMIZERS[program.optimizer](
            [each for copies in self.plain.values() for each in copies]
        )
        if verb == "replicate":
            replicate(self.model)
        else:
            mesh = init_device_mesh("cpu", (2, 2)) if verb == "hybrid" else None
            policy = {_Part} if program.seed % 2 else None
            fully_shard(self.model, policy=policy, mesh=mesh)
        self.optimizer = self.new()

    def new(self) -> Optimizer:
        made = OPTIMIZERS[self.program.optimizer](self.model.parameters())
        return step_on_matrices(made)

    def step_reference(self, number: int) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(1000 * self.program.seed + number)
        given: dict[str, Tensor | None] = {}
        for name, copies in self.plain.items():
            shape = (len(copies), *copies[0].shape) if name in self.stacks else copies[0].shape
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            left_out = number > 0 and torch.rand((), generator=generator) < 0.15
            given[name] = None if left_out or not copies[0].requires_grad else whole
            for index, each in enumerate(copies):
                part = whole[index] if name in self.stacks else whole
                each.grad = None if given[name] is None else part.clone()
        self.reference.step()
        return given

    def step(self, number: int) -> None:
        given = self.step_reference(number)
        for name, parameter in self.model.named_parameters():
            whole = given[name]
            parameter.grad = whole
            if isinstance(parameter, DTensor) and whole is not None:
                parameter.grad = PLAIN.shard_like(whole, parameter, torch.device("cpu"))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load_reference(self) -> None:
        """Torch gives some numbers another dtype."""
        self.reference.load_state_dict(self.reference.state_dict())

    def check(self, when: str) -> None:
        named = dict(self.model.named_parameters())
        wholes = all_full([p.detach() for p in named.values()])
        for (name, copies), whole in zip(self.plain.items(), wholes, strict=True):
            expected = torch.stack([*copies]) if name in self.stacks else copies[0]
            assert torch.equal(whole, expected), f"{when}: {name} of shape {tuple(whole.shape)}"
            if not isinstance(named[name], DTensor):
                every = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
                dist.all_gather(every, whole.contiguous())
                assert all(torch.equal(each, whole) for each in every), f"{when}: ranks, {name}"
        found = get_optimizer_state_dict(
            self.model, self.optimizer, options=StateDictOptions(full_state_dict=True)
        )["state"]
        for name, copies in self.plain.items():
            columns = [tree_flatten(_listed(self.reference.state.get(p, {})))[0] for p in copies]
            leaves = tree_flatten(_listed(found.get(name, {})))[0]
            assert len(leaves) == len(columns[0]), f"{when}: state of {name}: {leaves}"
            for leaf, column in zip(leaves, zip(*columns, strict=True), strict=True):
                expected = column[0]
                if not isinstance(expected, Tensor):
                    assert leaf == expected, f"{when}: state of {name}: {leaf} for {expected}"
                    continue
                if name in self.stacks and (expected.dim() or leaf.dim()):
                    expected = torch.stack(column)
                assert leaf.dtype == expected.dtype, f"{when}: {name}: {leaf.dtype}"
                assert torch.equal(leaf, expected), f"{when}: state of {name}: {leaf}, {expected}"

    def take(self, way: str) -> None:
        """Copy the optimizer, or save and load it."""
        options = StateDictOptions(full_state_dict=True)
        if way.startswith(("own", "torch")):
            self.load_reference()
        if way == "deepcopy":
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        elif way.startswith("own state"):
            state = self.optimizer.state_dict()
            if way == "own state in a file":
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=False)
            self.optimizer = self.new()
            self.optimizer.load_state_dict(state)
        elif way.startswith("torch"):
            kept = options if way == "torch, full" else None
            state = get_optimizer_state_dict(self.model, self.optimizer, options=kept)
            state = copy.deepcopy(state)
            if way != "torch":
                self.optimizer = self.new()
            set_optimizer_state_dict(self.model, self.optimizer, state, options=kept)
        elif way == "pickle" and any(self.optimizer.state.values()):
            try:
                pickle.dumps(self.optimizer)
            except OptimizerError as error:
                if "keeps the state of whole matrices" not in str(error):
                    raise
            else:
                assert not any(p.ndim >= 2 for p in self.model.parameters()), "was pickled"


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(value[key]) for key in sorted(value)}
    return [*map(_listed, value)] if isinstance(value, (list, tuple)) else value


def run_leg(program: Program, leg: int, folder: str) -> None:
    """On each rank. Four steps of each leg, of which two come after a copy or a state dict."""
    warnings.simplefilter("ignore")  # what torch's checkpoints warn of
    torch.set_num_threads(1)
    _, verb, way = program.legs[leg]
    beside = _Beside(program, verb)
    for former in range(leg):
        for number in range(4 * former, 4 * former + 4):
            if number % 4 == 2 and program.legs[former][2].startswith(("own", "torch")):
                beside.load_reference()
            beside.step_reference(number)
        beside.load_reference()
    if leg:
        _load(beside, f"{folder}/{leg - 1}")
        beside.check(f"leg {leg}, loaded")
    for number in range(4 * leg, 4 * leg + 2):
        beside.step(number)
    beside.check(f"leg {leg}, before {way}")
    beside.take(way)
    beside.check(f"leg {leg}, after {way}")
    for number in range(4 * leg + 2, 4 * leg + 4):
        beside.step(number)
    beside.check(f"leg {leg}, two steps after {way}")
    if leg + 1 < len(program.legs):
        weights, state = get_state_dict(beside.model, beside.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{leg}")


def _load(beside: _Beside, folder: str) -> None:
    with torch.no_grad():
        for parameter in beside.model.parameters():
            parameter.zero_()
    weights, state = get_state_dict(beside.model, beside.optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        beside.model,
        beside.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )


def run_program(pool: Pool, program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for leg, (ranks, _, _) in enumerate(program.legs):
            pool.run(ranks, run_leg, program, leg, folder, timeout=60, group_timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run generated programs of optimizers.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one; the others follow")
    parser.add_argument("--count", type=int, default=0, help="end after so many seeds")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    pool, done, wrong = Pool(("ignore",)), 0, 0
    while time.monotonic() < end and not (options.count and done >= options.count):
        program = program_of(options.seed + done)
        done += 1
        try:
            run_program(pool, program)
        except Exception as error:
            wrong += 1
            lines = [line for line in str(error).splitlines() if line.strip()]
            print(f"{program}\n    {' | '.join(lines[-3:])[-600:]}", flush=True)
    print(f"{done} programs, {wrong} wrong")
    pool.stop()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
