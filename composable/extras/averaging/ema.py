"""`EMA`: the exponential moving average of a model's parameters, on local shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.checked import Fraction, checked
from composable.compilation import unwrapped
from composable.errors import ForeignParameterError, few
from composable.seams import (
    at_rest,
    called,
    units_in,
    values_exchanged,
    warn_of_other_groups,
    write_whole,
    written,
)
from composable.tensors import cloned, describe_mesh, gradient_like, is_packed, whole_of
from composable.torch_private import local_tensor, placed_alike


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()


def refuse_other_names(
    caller: str, loaded: Mapping[str, Any], own: Mapping[str, Any], of: str
) -> None:
    """Raise if a state dict has other names than what it is loaded into, which is called `of`."""
    if differ := sorted(loaded.keys() ^ own.keys()):
        raise KeyError(
            f"{caller}: {few([*map(repr, differ)])} is in only one of the state dict and the {of}"
        )


def _copied(tensor: Tensor) -> Tensor:
    return gradient_like(cloned(_local(tensor)), tensor)


def _without_mean(tensors: Mapping[str, Tensor]) -> list[str]:
    """Those that have no average, as 4-bit weights have none. Each class is asked."""
    known: dict[type, bool] = {}
    for tensor in tensors.values():
        local = _local(tensor)
        if type(local) in known or not hasattr(local, "fsdp_pre_all_gather") or local.is_meta:
            continue
        try:
            torch._foreach_lerp_([cloned(local)], [local], 0.5)
            known[type(local)] = True
        except (NotImplementedError, RuntimeError, TypeError):
            known[type(local)] = False
    return [
        name
        for name, each in tensors.items()
        if is_packed(each) or not known.get(type(_local(each)), True)
    ]


class EMA:
    """Keep `average = decay * average + (1 - decay) * parameter` of every parameter.

    For buffers, and for frozen parameters of a class that cannot be averaged (4-bit weights), it
    keeps the newest value. Averages are shards, placed like the parameters, so updates need no
    communication. It works for annotated and plain models.

    Args:
        module: the annotated model. Create the EMA after you annotate.
        decay: weight of the past, from 0 to 1.

    Raises:
        ArgumentError: `decay` is not between 0 and 1.
        ForeignParameterError: a trainable parameter has a class that cannot be averaged.

    Example:
        >>> ema = EMA(model, decay=0.999)
        >>> for batch in batches:
        ...     step(batch)
        ...     ema.update()
        >>> with ema.swap():
        ...     evaluate(model)

    Source: Polyak averaging; `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`
    gives the same numbers.
    """

    @checked
    def __init__(self, module: nn.Module, *, decay: Fraction) -> None:
        self._model = unwrapped(module)
        self._decay = decay
        with torch.no_grad():
            tensors = self._tensors()
            self._averages = {name: _copied(tensor) for name, tensor in tensors.items()}
            self._fixed = _without_mean(tensors)
        trained = [name for name in self._fixed if tensors[name].requires_grad]
        if trained:
            raise ForeignParameterError(
                f"EMA: {few(list(map(repr, trained)))} trains and has no average: its class,"
                f" {type(_local(tensors[trained[0]])).__name__}, cannot compute lerp_. Freeze it,"
                " or average a model of plain parameters"
            )

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters at rest, and buffers that are in the state dict; tied ones once."""
        buffers: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    buffers.setdefault(id(buffer), (f"{prefix}.{name}".lstrip("."), buffer))
        with at_rest(units_in(self._model)):
            return {**dict(self._model.named_parameters()), **dict(buffers.values())}

    def _pairs(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return pairs of local tensors of the averages and of the model.

        First those that follow slowly, then those that are copied.
        """
        tensors = self._tensors()
        changed = [
            name
            for name in {**tensors, **self._averages}
            if not _alike(tensors.get(name), self._averages.get(name))
        ]
        if changed:
            raise ForeignParameterError(
                f"EMA: {few(list(map(repr, changed)))} was added, removed or sharded otherwise"
                " since the average was made. Make a new EMA(model, decay=...) and"
                " load_state_dict() the old one's state_dict()"
            )
        slow, copied = [], []
        for name, tensor in tensors.items():
            pair = _local(self._averages[name]), _local(tensor)
            if (
                isinstance(tensor, nn.Parameter)
                and name not in self._fixed
                and (tensor.is_floating_point() or tensor.is_complex())
            ):
                slow.append(pair)
            else:
                copied.append(pair)
        return slow, copied

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters to the averages. Call this after the optimizer's step."""
        called("EMA.update()")
        slow, copied = self._pairs()
        if slow:
            averages, values = zip(*slow, strict=True)
            torch._foreach_lerp_(averages, values, 1 - self._decay)
        for average, value in copied:
            average.copy_(value)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Let the model hold the averages inside the scope.

        After the scope, also after an exception, the model holds its own values again.
        """
        values_exchanged(back=False)
        try:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
        finally:
            values_exchanged(back=True)

    @torch.no_grad()
    def _exchange(self) -> None:
        """All of them, or none if it raises for want of memory."""
        pairs, done = [*chain(*self._pairs())], 0
        try:
            for done, pair in enumerate(pairs):  # noqa: B007
                _exchange(*pair)
        except BaseException:
            for pair in pairs[:done]:
                _exchange(*pair)
            raise
        finally:
            written(units_in(self._model))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by FQN, sharded like the parameters, and the decay.

        The result is for `torch.distributed.checkpoint`.
        """
        for prefix, module in self._model.named_modules():
            warn_of_other_groups(module, f"{prefix}." if prefix else "")
        return {"decay": self._decay, "averages": dict(self._averages)}

    @checked
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages: whole plain tensors, or shards.

        Shards may have any placement over ranks that include this one. All ranks call this
        together.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            KeyError: names are missing, or unknown.
            ForeignParameterError: an average has another shape, or is not a shard of this rank.
        """
        called("EMA.load_state_dict()")
        loaded = state_dict["averages"]
        refuse_other_names("EMA", loaded, self._averages, "average")
        for name, average in self._averages.items():
            _refuse_foreign(name, loaded[name], average)
        self._decay = state_dict["decay"]
        for name, average in self._averages.items():
            value = loaded[name]
            if isinstance(value, DTensor) and not (
                isinstance(average, DTensor) and average.device_mesh == value.device_mesh
            ):
                value = whole_of(value)
            write_whole(value, average)


def _exchange(average: Tensor, value: Tensor) -> None:
    kept = cloned(value)
    value.copy_(average)
    average.copy_(kept)


def _refuse_foreign(name: str, value: Tensor, average: Tensor) -> None:
    if value.shape != average.shape:
        raise ForeignParameterError(
            f"EMA: '{name}' has the shape {tuple(value.shape)} in the state dict, and"
            f" {tuple(average.shape)} in the model"
        )
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        here = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
        if not here or here != list(mesh.get_coordinate() or ()):
            raise ForeignParameterError(
                f"EMA: '{name}', over {describe_mesh(mesh)}, is the shard of another rank, as"
                " torch.save wrote it there, or is over other ranks. Save averages by"
                " torch.distributed.checkpoint, from all ranks"
            )


def _alike(tensor: Tensor | None, average: Tensor | None) -> bool:
    if tensor is None or average is None or tensor.shape != average.shape:
        return False
    return placed_alike([tensor], [average]) and _local(tensor).shape == _local(average).shape
