"""`MixedPrecisionPolicy`, `CPUOffloadPolicy`, and the types of other arguments of the verbs.

Policies are checked when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import torch
from torch import nn

from composable.checked import Takes, check_arguments
from composable.errors import AnnotationError

StateSync = Literal["check", "broadcast", "off"]
SYNC_MODES: Final = get_args(StateSync)

GradReduce = Annotated[
    Literal["mean", "sum"] | float,
    Takes(
        "'mean', 'sum' or a positive number to divide the sum over all ranks by",
        lambda value: value in ("mean", "sum") or 0.0 < value < math.inf,
    ),
]


def divisor_of(grad_reduce: GradReduce) -> float | None:
    """Return what the sum of gradients over all ranks is divided by.

    None stands for the number of ranks.
    """
    if grad_reduce == "mean":
        return None
    return 1.0 if grad_reduce == "sum" else float(grad_reduce)


def grad_reduce_in_words(divisor: float | None) -> str:
    """Invert `divisor_of`, for messages."""
    return "mean" if divisor is None else "sum" if divisor == 1.0 else f"sum / {divisor:g}"


_REAL: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BY_NAME: Final = {
    **dict(zip(("fp64", "fp32", "bf16", "fp16"), _REAL, strict=True)),
    **{str(dtype).removeprefix("torch."): dtype for dtype in _REAL},
}


def real_dtype(value: object, what: str) -> torch.dtype:
    """Return a dtype that parameters can be cast to, given as itself or by its name.

    Args:
        value: the dtype or its name.
        what: names the argument in the message.

    Raises:
        AnnotationError: `value` is no such dtype.
    """
    found = _BY_NAME.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if isinstance(found, torch.dtype) and found in _REAL:
        return found
    raise AnnotationError(
        f"{what} must be one of torch.float64, float32, bfloat16 and float16, or its name, e.g."
        f" 'bf16'; got {value!r}"
    )


# What `reduce_dtype` may be besides a dtype.
GRAD_DTYPE: Final = "grad_dtype"


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes, reduces gradients, and takes and returns tensors.

    At rest, parameters keep their own dtypes. Each argument is a dtype or its name ("bf16",
    "float32"). Attributes are dtypes.

    Args:
        param_dtype: gather parameters and compute with them in this dtype. None: in the dtype that
            they have.
        reduce_dtype: communicate and sum gradients in this dtype. None: in the `grad_dtype` that
            was set on a parameter, or otherwise in `param_dtype`. "grad_dtype": in the dtype of
            `.grad`. `.grad` has the parameter's dtype, or its `grad_dtype`.
        buffer_dtype: compute with buffers in this dtype. At rest, buffers keep their own dtypes.
            Writes of forward to buffers are kept. A dict maps FQNs and globs to dtypes. The last
            match counts, and buffers without a match are not cast.
        output_dtype: cast floating-point tensors that the annotated module's forward returns to
            this dtype. Units inside that a policy selects do not cast their outputs, unless the
            policy gives them their own `mp_policy`.
        cast_forward_inputs: cast floating-point inputs of forward to `param_dtype`.
        keep_grads_in_reduce_dtype: keep `.grad` in the `reduce_dtype`. The optimizer must accept
            such gradients.
        full_precision_classes: classes of modules that keep their own dtype inside a unit that
            computes in another dtype. This includes all modules below them. Their inputs are cast
            to their own dtype, and their outputs are cast back.
        param_dtype_override_fn: `fn(parameter) -> dtype | None`, called once for each parameter
            when it is annotated. If it returns the parameter's own dtype, the parameter computes in
            it, and the inputs of its module are not cast. If it returns `param_dtype` or None, the
            parameter is treated like the others.

    Example:
        >>> precision = MixedPrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")
        >>> fully_shard(model, policy={Block}, mp_policy=precision)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | Literal["grad_dtype"] | None = None
    buffer_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_grads_in_reduce_dtype: bool = False
    full_precision_classes: tuple[type[nn.Module], ...] = ()
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None

    if TYPE_CHECKING:  # it takes more than the attributes are

        def __init__(
            self,
            param_dtype: torch.dtype | str | None = None,
            reduce_dtype: torch.dtype | str | None = None,
            buffer_dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
            output_dtype: torch.dtype | str | None = None,
            cast_forward_inputs: bool = True,
            keep_grads_in_reduce_dtype: bool = False,
            full_precision_classes: type[nn.Module] | Iterable[type[nn.Module]] = (),
            param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            value, what = getattr(self, name), f"MixedPrecisionPolicy: {name}"
            if name == "buffer_dtype" and isinstance(value, Mapping):
                value = {key: real_dtype(dtype, f"{what}['{key}']") for key, dtype in value.items()}
            elif value is not None and (name, value) != ("reduce_dtype", GRAD_DTYPE):
                value = real_dtype(value, what)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "full_precision_classes", _classes(self.full_precision_classes))
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_arguments(MixedPrecisionPolicy.__init__, values)

    def __str__(self) -> str:
        """Name the fields that differ from their defaults."""
        said = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        if self.full_precision_classes:
            said["full_precision_classes"] = [each.__name__ for each in self.full_precision_classes]
        said.pop("param_dtype_override_fn", None)  # what it returned is said of each parameter
        return ", ".join(f"{name}={value}".replace("torch.", "") for name, value in said.items())

    @property
    def exact_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes that keep their dtype; none if nothing is cast."""
        return self.full_precision_classes if self.param_dtype is not None else ()

    def in_full_precision(self) -> MixedPrecisionPolicy:
        """Return the same policy for a module that computes and reduces in its own dtype.

        What is reduced is its gradients.
        """
        return replace(
            self,
            param_dtype=None,
            reduce_dtype=None,
            buffer_dtype=None,
            param_dtype_override_fn=None,
        )

    def keeps_dtype_of(self, parameter: nn.Parameter, fqn: str) -> bool:
        """Whether `param_dtype_override_fn` says that a parameter computes in its own dtype.

        Args:
            parameter: that the function is asked about.
            fqn: by which an error calls it.

        Raises:
            AnnotationError: it returned a third dtype.
        """
        choose = self.param_dtype_override_fn
        chosen = None if choose is None else choose(parameter)
        if chosen not in (None, self.param_dtype, parameter.dtype):
            raise AnnotationError(
                f"param_dtype_override_fn returned {chosen} for '{fqn}'; it may return the"
                f" parameter's own dtype ({parameter.dtype}), param_dtype ({self.param_dtype}) or"
                " None"
            )
        return chosen is not None and chosen != self.param_dtype


def _classes(value: object) -> tuple[type[nn.Module], ...]:
    classes = (value,) if isinstance(value, type) else value
    if isinstance(classes, list | tuple | set | frozenset):
        ordered = classes if isinstance(classes, list | tuple) else sorted(classes, key=str)
        if all(isinstance(each, type) and issubclass(each, nn.Module) for each in ordered):
            return tuple(ordered)
    raise AnnotationError(
        "MixedPrecisionPolicy: full_precision_classes must be a class of modules, or several, got"
        f" {value!r}"
    )


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy:
    """Keep sharded parameters, their gradients and the optimizer's state in the host's memory.

    The device holds only unsharded parameters, and shards during a copy. On a mesh of CPUs, the
    policy has no effect.

    Args:
        pin_memory: use pinned memory, so that copies overlap with computation. False uses ordinary
            memory, for hosts with little memory. The host then waits for each copy.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,))
        >>> fully_shard(model, policy={Block}, mesh=mesh, offload_policy=CPUOffloadPolicy())
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_arguments(CPUOffloadPolicy.__init__, {"pin_memory": self.pin_memory})
