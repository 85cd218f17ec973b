"""The one comparator of trainings; knows models, optimizers and process groups, but no annotation.

The reference is trained in this very process, by torch alone: one model on the concatenation of all
ranks' batches or, where that is another computation (batch statistics, experts of one rank), one
simulated replica per rank whose gradients are averaged. SGD with momentum, because Adam hides
factors and magnifies noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.helpers.battery import Case
from tests.helpers.world import current_device

LEARNING_RATE = 0.1
MOMENTUM = 0.9
# About sixteen digits in float64, seven in float32; what is added in another order loses a few of
# them.
TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (2e-5, 1e-6)}


@dataclass
class Training:
    """What one rank saw of a training."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


Replicated = Callable[[nn.Module, Case], list[nn.Module]]


def nothing_replicated(model: nn.Module, case: Case) -> list[nn.Module]:
    return []


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, however it is distributed; collective."""
    return all_full([tensor])[0]


def all_full(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All of each tensor, however it is distributed; one collective for those that the same ranks
    have shards of.

    What `full_tensor` does, by a collective that is waited for where it is called. The functional
    ones of torch 2.13 spoil the heap over gloo about once in a million calls (`all_gather_tensor`
    in a loop, in one process, is enough); tests make many.
    """
    whole: dict[int, Tensor] = {}
    together: dict[tuple[dist.ProcessGroup, torch.device], list[_Sharded]] = {}
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor):
            whole[index] = tensor.detach().clone()
            continue
        cuts = [
            (place, at.dim) for place, at in enumerate(tensor.placements) if isinstance(at, Shard)
        ]
        if (
            len(cuts) != 1
            or not tensor.numel()
            or not all(isinstance(at, Shard | Replicate) for at in tensor.placements)
        ):
            whole[index] = tensor.full_tensor().detach().clone()
            continue
        place, dim = cuts[0]
        together.setdefault((tensor.device_mesh.get_group(place), tensor.device), []).append(
            _Sharded(index, tensor, dim)
        )
    for (group, _), distributed in together.items():
        whole |= _gathered(group, distributed)
    return [whole[index] for index in range(len(tensors))]


@dataclass(frozen=True)
class _Sharded:
    """A tensor that is cut along one dimension, and its place in a list."""

    index: int
    tensor: DTensor
    dim: int

    def padded(self, ranks: int) -> Tensor:
        """This rank's shard, as large as the largest."""
        own = self.tensor.to_local().detach()
        shape = [*own.shape]
        shape[self.dim] = -(-self.tensor.shape[self.dim] // ranks)
        sent = own.new_zeros(shape)
        sent.narrow(self.dim, 0, own.shape[self.dim]).copy_(own)
        return sent

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return (
            torch.cat(list(parts), self.dim)
            .narrow(self.dim, 0, self.tensor.shape[self.dim])
            .clone()
        )


def _gathered(group: dist.ProcessGroup, distributed: Sequence[_Sharded]) -> dict[int, Tensor]:
    ranks = group.size()
    sent = [each.padded(ranks) for each in distributed]
    message = torch.cat([shard.flatten().view(torch.uint8) for shard in sent])
    messages = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(messages, message, group=group)
    of_ranks = [received.split([shard.nbytes for shard in sent]) for received in messages]
    return {
        each.index: each.joined(
            [pieces[number].clone().view(shard.dtype).view(shard.shape) for pieces in of_ranks]
        )
        for number, (each, shard) in enumerate(zip(distributed, sent, strict=True))
    }


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by FQN; collective."""
    named = dict(model.named_parameters())
    return dict(zip(named, all_full(list(named.values())), strict=True))


def full_gradients(
    of: nn.Module | Iterable[tuple[str, nn.Parameter]],
) -> dict[str, Tensor | None]:
    """All gradients by FQN, of a module or of named parameters; collective."""
    named = of.named_parameters() if isinstance(of, nn.Module) else of
    gradients = {name: p.grad for name, p in named}
    there = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    whole = dict(zip(there, all_full(list(there.values())), strict=True))
    return {name: whole.get(name) for name in gradients}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that an annotation must leave as it is."""
    return {
        "types": [(name, type(module)) for name, module in model.named_modules()],
        "forwards": [
            (name, getattr(m.forward, "__func__", None), "forward" in vars(m))
            for name, m in model.named_modules()
        ],
        "parameters": [
            (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
        ],
        "all names of parameters": [
            name for name, _ in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()],
        "state dict": list(model.state_dict()),
    }


# --- references ---------------------------------------------------------------------------------


def joined_training(case: Case, ranks: int, steps: int, seed: int) -> Training:
    """One model on the concatenation of the ranks' batches. Its losses are the means over the
    ranks.
    """
    device = current_device()
    model = case.model(seed, 0, device)
    optimizer, seen = sgd(model), Training()
    for step in range(steps):
        batches = [case.inputs(seed, step, rank, device) for rank in range(ranks)]
        loss = case.loss(model, *[torch.cat(parts) for parts in zip(*batches, strict=True)])
        loss.backward()
        seen.losses.append(loss.detach())
        seen.gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    seen.parameters, seen.buffers = full_parameters(model), _buffers(model)
    return seen


def replica_trainings(
    case: Case, ranks: int, steps: int, seed: int, replicated: Replicated = nothing_replicated
) -> list[Training]:
    """One model per rank, trained in turn; gradients are averaged except of what a rank trains by
    itself.

    Args:
        replicated: the modules whose own buffers are the first replica's before every forward.
    """
    device = current_device()
    models = [case.model(seed, rank, device) for rank in range(ranks)]
    optimizers = [sgd(model) for model in models]
    seen = [Training() for _ in models]
    for step in range(steps):
        first = replicated(models[0], case)
        for model in models[1:]:
            for mine, theirs in zip(replicated(model, case), first, strict=True):
                for own, leading in zip(
                    mine.buffers(recurse=False), theirs.buffers(recurse=False), strict=True
                ):
                    own.copy_(leading)
        for rank, model in enumerate(models):
            loss = case.loss(model, *case.inputs(seed, step, rank, device))
            loss.backward()
            seen[rank].losses.append(loss.detach())
        for name, _ in models[0].named_parameters():
            if not case.is_own(name):
                _average([model.get_parameter(name) for model in models])
        for rank, model in enumerate(models):
            seen[rank].gradients.append(full_gradients(model))
            optimizers[rank].step()
            optimizers[rank].zero_grad()
    for rank, model in enumerate(models):
        seen[rank].parameters, seen[rank].buffers = full_parameters(model), _buffers(model)
    return seen


def _average(copies: list[nn.Parameter]) -> None:
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    if gradients:
        mean = torch.stack(gradients).sum(0) / len(copies)
        for copy in copies:
            copy.grad = mean.clone()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


# --- the annotated model ------------------------------------------------------------------------


def distributed_training(case: Case, model: nn.Module, steps: int, seed: int) -> Training:
    """Train `model`, as annotated, on this rank's batches."""
    rank, device = dist.get_rank(), current_device()
    optimizer, seen = sgd(model), Training()
    for step in range(steps):
        loss = case.loss(model, *case.inputs(seed, step, rank, device))
        loss.backward()
        seen.losses.append(loss.detach())
        seen.gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    seen.parameters, seen.buffers = full_parameters(model), _buffers(model)
    return seen


# --- comparison ---------------------------------------------------------------------------------


def _differ(
    what: str, expected: Tensor | None, actual: Tensor | None, precision: torch.dtype
) -> list[str]:
    if expected is None or actual is None:
        if expected is actual:
            return []
        return [f"{what}: expected {_brief(expected)}, got {_brief(actual)}"]
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return [f"{what}: expected {_brief(expected)}, got {_brief(actual)}"]
    rtol, atol = TOLERANCES[precision] if expected.is_floating_point() else (0.0, 0.0)
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return [f"{what}: {' '.join(str(error).split())}"]
    return []


def _brief(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _by_name(
    what: str, expected: dict[str, Any], actual: dict[str, Any], precision: torch.dtype
) -> list[str]:
    if list(expected) != list(actual):
        return [f"{what}: expected the names {list(expected)}, got {list(actual)}"]
    return [
        line
        for name in expected
        for line in _differ(f"{what} '{name}'", expected[name], actual[name], precision)
    ]


def differences_in_training(expected: Training, actual: Training) -> list[str]:
    """Every way in which `actual` is not `expected`, the earliest first."""
    found: list[str] = []
    # One layer in single precision limits what the others' gradients can agree to.
    dtypes = [parameter.dtype for parameter in expected.parameters.values()]
    precision = torch.float32 if torch.float32 in dtypes else torch.float64
    for step, (one, other) in enumerate(zip(expected.losses, actual.losses, strict=True)):
        found += _differ(f"loss of step {step}", one, other, precision)
        found += _by_name(
            f"gradient of step {step}", expected.gradients[step], actual.gradients[step], precision
        )
    found += _by_name("parameter", expected.parameters, actual.parameters, precision)
    return found + _by_name("buffer", expected.buffers, actual.buffers, precision)


def differences_in_anatomy(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Every part of `before` that is not the same in `after`."""
    return [
        f"{part}: was {before[part]}, is {after[part]}"
        for part in before
        if before[part] != after[part]
    ]


def differences(
    case: Case,
    annotate: Callable[[nn.Module, Case], None],
    *,
    steps: int = 3,
    seed: int = 0,
    replicated: Replicated = nothing_replicated,
) -> list[str]:
    """What tells the annotated model's training on all ranks from the reference's; collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = case.model(seed, rank, current_device())
    before = anatomy(model)
    case.prepare(model)
    annotate(model, case)
    found = differences_in_anatomy(before, anatomy(model))
    actual = distributed_training(case, model, steps, seed)
    found += [f"after training, {line}" for line in differences_in_anatomy(before, anatomy(model))]
    if case.joined:
        expected = joined_training(case, ranks, steps, seed)
        for loss in actual.losses:
            dist.all_reduce(loss)
            loss /= ranks
    else:
        expected = replica_trainings(case, ranks, steps, seed, replicated)[rank]
    return found + differences_in_training(expected, actual)


def assert_same_training(
    case: Case,
    annotate: Callable[[nn.Module, Case], None],
    *,
    steps: int = 3,
    seed: int = 0,
    replicated: Replicated = nothing_replicated,
) -> None:
    """Train `case` annotated on all ranks and un-annotated in this process: nothing that can be
    seen may differ.

    Args:
        annotate: gets the model and its case; every rank calls it.
        replicated: the modules whose buffers are rank 0's at the start of each forward, as
            `replicate` promises.
    """
    found = differences(case, annotate, steps=steps, seed=seed, replicated=replicated)
    shown = "\n  ".join(found[:12])
    assert not found, f"'{case.name}', {len(found)} differences:\n  {shown}"


# --- any program --------------------------------------------------------------------------------

Program = Callable[[nn.Module, Tensor], object]


def assert_same_gradients(
    case: Case, annotate: Callable[[nn.Module, Case], None], program: Program
) -> None:
    """Run any program, with its backwards, on the model with and without annotations: gradients
    agree.

    The reference runs the program on this rank's own batch; its gradients are averaged over the
    ranks afterwards. So programs can do what no concatenation of batches has a counterpart for. A
    training step after the program shows that nothing of it is left over.

    Args:
        program: gets the model and a batch of one tensor; what it returns must agree too.
    """
    rank, device = dist.get_rank(), current_device()
    plain = case.model(0, rank, device)
    annotated = case.model(0, rank, device)
    case.prepare(annotated)
    annotate(annotated, case)
    found: list[str] = []
    for step, run in enumerate((program, _plain_step)):
        (batch,) = case.inputs(0, step, rank, device)
        expected, actual = run(plain, batch.clone()), run(annotated, batch.clone())
        if isinstance(expected, Tensor) and isinstance(actual, Tensor):
            found += _differ(
                f"result of run {step}", expected.detach(), actual.detach(), torch.float64
            )
        else:
            assert expected == actual
        found += _by_name(
            f"gradient of run {step}",
            averaged_gradients(plain),
            full_gradients(annotated),
            torch.float64,
        )
        plain.zero_grad()
        annotated.zero_grad()
    shown = "\n  ".join(found[:12])
    assert not found, f"'{case.name}', {len(found)} differences:\n  {shown}"


def averaged_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The means over all ranks of a plain model's gradients; collective. None where no rank has
    one.
    """
    named = dict(model.named_parameters())
    means: dict[str, Tensor | None] = dict.fromkeys(named)
    together: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, parameter in named.items():
        together.setdefault((parameter.dtype, parameter.device), []).append(name)
    for (dtype, device), names in together.items():
        gradients = [named[name].grad for name in names]
        present = torch.tensor(
            [gradient is not None for gradient in gradients], dtype=torch.int32, device=device
        )
        filled = [
            named[name].new_zeros(named[name].shape) if g is None else g
            for name, g in zip(names, gradients, strict=True)
        ]
        total = torch.cat([gradient.detach().flatten() for gradient in filled])
        assert total.dtype == dtype
        dist.all_reduce(present)
        dist.all_reduce(total)
        sums = total.split([gradient.numel() for gradient in filled])
        for name, gradient, some in zip(names, sums, present.tolist(), strict=True):
            means[name] = (
                (gradient / dist.get_world_size()).view(named[name].shape) if some else None
            )
    return means


def assert_mean_gradients(
    plain: nn.Module,
    model: nn.Module,
    where: object = "",
    *,
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Gradients of `model` are the means over all ranks of those of `plain`, and the same ones are
    missing; collective.
    """
    actual = full_gradients(model)
    for name, mean in averaged_gradients(plain).items():
        gradient = actual[name]
        assert (gradient is None) == (mean is None), f"{where} {name}"
        if gradient is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            torch.testing.assert_close(
                gradient,
                mean,
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name: f"{where} {name}: {text}",
            )


def _plain_step(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss
