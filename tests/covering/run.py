"""A program of the table: our model and one of one process, step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from composable import fully_shard, no_sync, reduce_gradients
from tests.covering.model import SEQUENCE, Linear, Net
from tests.extensions.rows import Rows
from tests.helpers.compare import full_gradients, full_parameters
from tests.helpers.meshes import shared_mesh
from tests.helpers.world import current_device
from tests.tensor_parallel.models import WIDTH, full

if TYPE_CHECKING:
    from tests.covering.options import Accumulation, Array, Mesh, Row

STEPS: Final = 4
ROWS: Final = 2  # of each batch


class Run:
    """A program while it runs.

    Attributes:
        model: ours.
        alone: that of one process, in float64, which sees the batches of all ranks.
        roots: what was annotated, in that order.
        index: of this rank among those that have different batches, of which there are `ranks`.
        averages: of `alone` and of `model`.
        given: by step, the model, weights that its evaluation returned, and copies of then.
        found: how the two differ.
    """

    def __init__(self, array: Array, row: Row) -> None:
        self.choices = {name: values[row[name]] for name, values in array.options.items()}
        self.verb, self.found = array.verb, list[str]()
        self.layout: Mesh = self.choices["mesh"].is_
        self.accumulation: Accumulation = self.choices["accumulation"].is_
        self.mesh = shared_mesh(current_device().type, self.layout.shape, self.layout.names)
        data = self.mesh.mesh.permute(
            *map(self.layout.names.index, (*self.layout.data, *self._beside()))
        ).flatten(0, len(self.layout.data) - 1)
        self.ranks = len(data)
        self.index = int((data == dist.get_rank()).nonzero()[0, 0])
        self.is_hybrid = self.verb is fully_shard and "replicate" in self.layout.data
        self.in_backward = row["optimizer"] == "in backward"
        self.joins = row["join"] == "yes"
        self.grad_reduce, self.divisor = self.choices["grad_reduce"].is_(self.ranks)
        choices = self.choices.values()
        self.tolerance = max(each.tolerance for each in choices) * prod(
            each.coarser for each in choices
        )
        self.averages: list[Any] = []
        self.given: list[tuple[Net, dict[str, tuple[Tensor, Tensor]]]] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.roots: list[Any] = []
        self.model, self.alone = self._make(), self._make().double()

    def _beside(self) -> list[str]:
        return [name for name in self.layout.names if name not in self.layout.data]

    def _make(self) -> Net:
        torch.manual_seed(0)
        return Net(experts="ep" in self.layout.names).to(current_device())

    # --- annotation -----------------------------------------------------------------------------

    def start(self) -> None:
        """Annotate the model and make optimizers."""
        choices = self.choices.values()
        self.layout.distribute(self.model, self.mesh)
        for choice in choices:
            for model in (self.model, self.alone):
                choice.both(model)
        for choice in choices:
            choice.before(self)
        self._dtype = self.model.first.weight.dtype
        if self.model.moe is not None:
            # tokens of all ranks come to experts, which some of them have
            divisor = float(self.divisor)
            mesh = {"mesh": self.mesh["efsdp"]}
            self.annotate(self.model.moe.experts, grad_reduce=divisor, **mesh)
        self.choices["modules"].is_(self)
        self._emulate()
        for choice in choices:
            choice.after(self)
        make = self.choices["optimizer"].is_
        self.optimizer = make(self.model.parameters(), ours=True)
        self.optimizer_alone = make(self.alone.parameters(), ours=False)

    def annotate(self, module: Any, *, verb: Any = None, **options: Any) -> None:
        """By the array's verb, with all its keywords, or by the other one."""
        verb = verb or self.verb
        keywords: dict[str, Any] = {"grad_reduce": self.grad_reduce}
        for choice in self.choices.values():
            keywords |= {**choice.both_verbs, **(choice.keywords if verb is self.verb else {})}
        verb(module, **{**keywords, **self.layout.keywords(verb, self.mesh), **options})
        if verb is self.verb:
            self.roots.append(module)

    def _emulate(self) -> None:
        """Weights that are sent as bytes round in one process, too."""
        for name, linear in self.model.linears():
            sharded = isinstance(getattr(linear.weight, "_local_tensor", None), Rows)
            clone: Any = self.alone.get_submodule(name)
            clone.emulates = sharded and self._is_sharded(linear)

    def _is_sharded(self, linear: Linear) -> bool:
        return any(place.is_shard() for place in linear.weight.placements)  # type: ignore[attr-defined]

    # --- steps ----------------------------------------------------------------------------------

    def batch(self, step: int, number: int, index: int) -> Tensor:
        seed = 1 + (step * 10 + number) * 10 + index
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(ROWS, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64)
        return batch.to(current_device(), self._dtype)

    def loss(self, model: Net, step: int, number: int, index: int) -> Tensor:
        extra = self.choices["parts"].is_(index, step + number)
        batch = self.batch(step, number, index)
        if model is self.alone:
            batch = batch.double()
        with ExitStack() as scopes:
            for choice in self.choices.values() if model is self.model else ():
                scopes.enter_context(choice.forward(self))
            out = model(batch, extra=extra)
        return 4 * out.double().square().mean()

    def has_data(self, step: int, index: int) -> bool:
        """The last rank has fewer batches where ranks join."""
        return not self.joins or index < self.ranks - 1 or step < STEPS - 1

    def train(self) -> None:
        with ExitStack() as scopes:
            for choice in self.choices.values():
                scopes.enter_context(choice.around(self))
            for step in range(STEPS):
                self._step(step)
        for choice in self.choices.values():
            choice.finish(self)
        self.compare_parameters()

    def _step(self, step: int) -> None:
        here = self.has_data(step, self.index)
        for choice in self.choices.values() if here else ():
            choice.step(self, step)
        if here:
            self._backwards(step)
        self._backwards_alone(step)
        ours = self._clip(self.model) if here else {}
        theirs = self._clip(self.alone)
        if self.in_backward:
            return
        if not self.joins:  # where ranks must not communicate
            expected = {name: each.grad for name, each in self.alone.named_parameters()}
            actual = full_gradients(self.model)
            self.compare(f"gradient of step {step}", expected | theirs, actual | ours)
        self.optimizer_alone.step()
        self.zero_grad(self.optimizer_alone)
        if here:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.zero_grad(self.optimizer)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=not self.accumulation.zeros)

    def _backwards(self, step: int) -> None:
        how = self.accumulation
        with ExitStack() as scopes:
            for choice in self.choices.values():
                scopes.enter_context(choice.backwards(self))
            self._all_backwards(step, how)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def _all_backwards(self, step: int, how: Accumulation) -> None:
        for number in range(how.backwards):
            held = how.held and (how.closes or number < how.backwards - 1)
            with no_sync(self.model, level=how.held) if held else nullcontext():
                loss = self.loss(self.model, step, number, self.index)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if how.closes:
            reduce_gradients(self.model)

    def _backwards_alone(self, step: int) -> None:
        how = self.accumulation
        for number in range(how.backwards):
            for index in range(self.ranks):
                if self.has_data(step, index):
                    loss = self.loss(self.alone, step, number, index)
                    (loss / self.divisor).backward()
            if self.in_backward and (not how.held or number == how.backwards - 1):
                self.optimizer_alone.step()
                self.optimizer_alone.zero_grad()

    def _clip(self, model: Net) -> dict[str, Any]:
        """The norm, by name, if there is one."""
        clip = self.choices["clipping"].is_
        if clip is None:
            return {}
        if model is self.alone:
            clip = torch.nn.utils.clip_grad_norm_
        return {"the norm": full(clip(model.parameters(), 1.0))}

    # --- comparison -----------------------------------------------------------------------------

    def compare_parameters(self) -> None:
        self.compare("parameter", dict(self.alone.named_parameters()), full_parameters(self.model))

    def compare(
        self,
        what: str,
        expected: Mapping[str, Tensor | None],
        actual: Mapping[str, Tensor | None],
    ) -> None:
        """By norms: of the difference, and of what is expected."""
        norms = [each.detach().norm().item() for each in expected.values() if each is not None]
        for name, one in expected.items():
            other = actual.get(name)
            if one is None or other is None:
                if one is not other:
                    got = "None" if other is None else f"of norm {other.detach().norm():.3g}"
                    there = "None" if one is None else f"of norm {one.detach().norm():.3g}"
                    self.found.append(f"{what} '{name}': must be {there}, is {got}")
                continue
            # what is offloaded is on the host
            one, other = one.detach().double().cpu(), other.detach().double().cpu()
            if one.shape != other.shape:
                self.found.append(f"{what} '{name}': has the shape {tuple(other.shape)}")
                continue
            limit = self.tolerance * (one.norm().item() + 0.1 * max(norms))
            if not (one - other).norm().item() <= limit:
                times = (one * other).sum() / (one * one).sum().clamp(min=1e-30)
                self.found.append(
                    f"{what} '{name}': off by {(one - other).norm() / one.norm():.2g} of its norm,"
                    f" {times:.3g} times what it must be"
                )


# --- state that is saved and loaded -------------------------------------------------------------


def _scramble(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)


def reloaded(state_of: Callable[[Run], Any], run: Run) -> None:
    state = state_of(run)
    _scramble(run)
    run.model.load_state_dict(state)


def saved_by_torch(run: Run) -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weights, state = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    _scramble(run)
    dcp.load(loaded := {"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=StateDictOptions(strict=False),  # of parameters that never had a gradient
    )
