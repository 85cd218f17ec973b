"""What the user may pass as `mp_policy`, and what it becomes; knows no parameter."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import fsdp

from composable.config import DTYPES_BY_NAME, MixedPrecisionPolicy
from composable.errors import AnnotationError

MixedPrecision = MixedPrecisionPolicy | fsdp.MixedPrecisionPolicy | torch.dtype | str | None

CAN_KEEP: Final = hasattr(torch.Tensor, "grad_dtype")


def precision_policy(verb: str, value: Any) -> MixedPrecisionPolicy:
    """The policy that an argument stands for.

    Raises:
        AnnotationError: it is none, or asks for what this torch cannot do.
    """
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        value = MixedPrecisionPolicy(
            param_dtype=value.param_dtype,
            reduce_dtype=value.reduce_dtype,
            output_dtype=value.output_dtype,
            cast_forward_inputs=value.cast_forward_inputs,
        )
    elif isinstance(value, torch.dtype) or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES_BY_NAME):
        value = MixedPrecisionPolicy(param_dtype=value)
    elif value is None:
        value = MixedPrecisionPolicy()
    if not isinstance(value, MixedPrecisionPolicy):
        raise AnnotationError(
            f"{verb}: mp_policy must be a MixedPrecisionPolicy (composable's or torch's), or a floating-point dtype or its "
            f"name, e.g. 'bf16'; got {value!r}"
        )
    if value.keep_grads_in_reduce_dtype and not CAN_KEEP:
        raise AnnotationError(
            f"{verb}: keep_grads_in_reduce_dtype needs a torch in which a gradient may have another dtype than its parameter "
            f"(Tensor.grad_dtype); this is torch {torch.__version__}. Leave it out, and gradients have the parameter's dtype"
        )
    return value
