"""What the user asks for, as frozen values; knows neither tensors nor process groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import nn

from composable.dtypes import REAL, SHORT
from composable.errors import AnnotationError, closest


@dataclass(frozen=True, slots=True)
class Free:
    """Free the unsharded parameters after forward and gather them again in backward."""


@dataclass(frozen=True, slots=True)
class FreeUnlessLast:
    """`Free`, but for what backward needs first: the units whose forwards ended last, until another unit is entered."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the unsharded parameters until backward is done: more memory, one gather fewer."""


@dataclass(frozen=True, slots=True)
class ReshardTo:
    """Keep a shard over `ranks` consecutive ranks after forward, so that backward gathers nearby."""

    ranks: int


AfterForward = Free | FreeUnlessLast | Keep | ReshardTo

SYNC_MODES: Final = ("check", "broadcast", "off")

GradReduce = str | float


def divisor_of(verb: str, grad_reduce: object) -> float | None:
    """What the sum of gradients over all ranks is divided by; None for the number of ranks.

    Raises:
        AnnotationError: it is neither "mean" nor "sum" nor a positive number.
    """
    if grad_reduce == "mean":
        return None
    if grad_reduce == "sum":
        return 1.0
    if type(grad_reduce) in (int, float) and 0.0 < float(grad_reduce) < math.inf:  # type: ignore[arg-type]
        return float(grad_reduce)  # type: ignore[arg-type]
    near = "".join(f"; did you mean '{name}'?" for name in closest(str(grad_reduce), ("mean", "sum")))
    raise AnnotationError(
        f"{verb}: grad_reduce must be 'mean', 'sum' or a positive number to divide the sum over all ranks by, got "
        f"{grad_reduce!r}{near}"
    )


def grad_reduce_in_words(divisor: float | None) -> str:
    """What `divisor_of` was given, as short as it goes."""
    return "mean" if divisor is None else "sum" if divisor == 1.0 else f"sum / {divisor:g}"


def after_forward(value: bool | int | None) -> AfterForward:
    """The value of `reshard_after_forward`, by name. Whether the number fits the mesh is for the caller to say."""
    if value is None:
        return FreeUnlessLast()
    if value is True:
        return Free()
    if value is False:
        return Keep()
    return ReshardTo(int(value))


_REAL: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in REAL}
DTYPES_BY_NAME: Final = {**{short: _REAL[name] for short, name in SHORT.items()}, **_REAL}


def real_dtype(value: object, what: str) -> torch.dtype:
    """A dtype that parameters can be cast to, given itself or by its name.

    Raises:
        AnnotationError: it is none; `what` says whose it is.
    """
    found = DTYPES_BY_NAME.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not any(found is dtype for dtype in _REAL.values()):
        raise AnnotationError(
            f"{what} must be one of torch.float64, float32, bfloat16 and float16, or its name, e.g. 'bf16'; got {value!r}"
        )
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes, sums gradients, and takes and returns tensors. Parameters rest in their own.

    Each is a dtype or its name ("bf16", "float32"); attributes are dtypes.

    Args:
        param_dtype: parameters are gathered and computed with in it. None: in the dtype that they have.
        reduce_dtype: gradients are sent and summed in it. None: in `param_dtype`. What users see as `.grad` has the parameter's
            dtype again.
        buffer_dtype: buffers are computed with in it; between calls they have their own. What forward writes to them is kept.
            A dict gives dtypes to FQNs and globs, the last that matches counts, and leaves the others as they are.
        output_dtype: floating-point tensors that the annotated module's forward returns are cast to it. Units inside that a
            policy picks return what they compute, unless the policy gives them an `mp_policy` of their own.
        cast_forward_inputs: floating-point tensors that forward is given are cast to `param_dtype`.
        keep_grads_in_reduce_dtype: `.grad` has the `reduce_dtype`; the optimizer must be one that takes such gradients.
        full_precision_classes: classes of modules that keep their dtype where the modules around them compute in another one,
            with all that is below them: what they get is cast to it, and what they return is cast back.
        full_precision_in_eval: while the outermost annotated module of a call is in evaluation mode, only outputs are cast.

    Example:
        >>> fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32"))
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    buffer_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    keep_grads_in_reduce_dtype: bool = False
    full_precision_classes: Any = ()
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value, what = getattr(self, field.name), f"MixedPrecisionPolicy: {field.name}"
            if field.name == "full_precision_classes":
                object.__setattr__(self, field.name, _classes(value, what))
            elif field.name == "buffer_dtype" and isinstance(value, Mapping):
                named = {name: real_dtype(dtype, f"{what}['{name}']") for name, dtype in value.items()}
                object.__setattr__(self, field.name, named)
            elif field.name.endswith("_dtype") and field.default is None:
                if value is not None:
                    object.__setattr__(self, field.name, real_dtype(value, what))
            elif type(value) is not bool:
                raise AnnotationError(f"{what} must be True or False, got {value!r}")

    def __str__(self) -> str:
        """What differs from the defaults."""
        said = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}
        if self.full_precision_classes:
            said["full_precision_classes"] = [each.__name__ for each in self.full_precision_classes]
        return ", ".join(f"{name}={value}".replace("torch.", "") for name, value in said.items())

    def in_full_precision(self) -> MixedPrecisionPolicy:
        """The same for a module that computes, and sums gradients, in the dtype that it has."""
        return replace(self, param_dtype=None, reduce_dtype=None, buffer_dtype=None)


def _classes(value: object, what: str) -> tuple[type[nn.Module], ...]:
    classes = (value,) if isinstance(value, type) else value
    if isinstance(classes, list | tuple | set | frozenset):
        ordered = classes if isinstance(classes, list | tuple) else sorted(classes, key=str)
        if all(isinstance(each, type) and issubclass(each, nn.Module) for each in ordered):
            return tuple(ordered)
    raise AnnotationError(f"{what} must be a class of modules, or several, got {value!r}")


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy:
    """Sharded parameters, their gradients and with them an optimizer's state rest in the host's memory.

    The device holds what is gathered, and shards on their way. On a mesh of CPUs there is nothing to do.

    Args:
        pin_memory: the host's memory is pinned, so that copies run beside what computes. False: ordinary memory, for hosts
            with little of it; then the host waits for each copy.

    Example:
        >>> fully_shard(model, policy={Block}, mesh=init_device_mesh("cuda", (8,)), offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if type(self.pin_memory) is not bool:
            raise AnnotationError(f"CPUOffloadPolicy: pin_memory must be True or False, got {self.pin_memory!r}")
