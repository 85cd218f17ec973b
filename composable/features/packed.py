"""Parameters of bytes whose meaning is in Python attributes: 4-bit weights of bitsandbytes.

Such a parameter, a `Params4bit`, is a tensor of packed bytes of shape `[number, 1]`. Its attribute
`quant_state` has the scales, the code, and the shape of what the bytes stand for. It is frozen.

| | |
|---|---|
| at rest | a `DTensor(Shard(0))` of the bytes, with the attributes |
| gathered | as parameters of integers are: in their own dtype, whatever the precision policy says |
| compute | a parameter of the user's class around the gathered bytes, with the same attributes |

The scales are small, and whole on every rank. One `quant_state` is shared by the module and both
forms of the parameter. A class is known by its attributes, so that the package is not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from composable.engine.params.param import PLAIN, ParamForm
from composable.tensors.protocol import is_packed as is_packed

# Whether a linear of bitsandbytes packs its weight anew for evaluation on a CPU with AVX512-BF16.
_REPACKS: Final = "support_avx512bf16_for_cpu"

# The attribute of an 8-bit weight of bitsandbytes, which is replicated.
_OF_8_BITS: Final = "SCB"


def refusal_of(name: str, parameter: Any) -> str:
    """Why a packed parameter cannot be cut, and what to do; empty if it can."""
    kind = type(parameter).__name__
    if parameter.quant_state is None:
        return (
            f"parameter '{name}' of class {kind} is not quantised yet. Move the model to its device"
            " first, which quantises it, or leave it out with ignored_params"
        )
    if getattr(parameter.quant_state, "packing_format_for_cpu", False):
        return (
            f"parameter '{name}' of class {kind} is packed for evaluation on this CPU. Call"
            " state_dict() of its module, which packs it as before, or leave it out with"
            " ignored_params"
        )
    return ""


class PackedForm(ParamForm):
    """See the top of this file.

    Args:
        kind: the user's class.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: type[nn.Parameter]) -> None:
        self._kind = kind

    @property
    @override
    def kind(self) -> type[nn.Parameter]:
        return self._kind

    @override
    def finish_copy(self, made: Any, memo: dict[Any, Any]) -> None:
        """Let a copy have scales of its own, which its module's copy shares."""
        made.quant_state = copy.deepcopy(made.quant_state, memo)


def form_of(parameter: nn.Parameter) -> ParamForm:
    """The form of a parameter that is not distributed over ranks."""
    own = is_packed(parameter) and not isinstance(parameter, DTensor)
    return PackedForm(type(parameter)) if own else PLAIN


def prepare_packed(module: nn.Module, device: torch.device) -> list[Callable[[], object]]:
    """Let a module compute on `device` with packed parameters that come and go, and a bias that
    does, and load what its state dict has of their scales; returns what undoes it.
    """
    packed: list[Any] = [each for each in module.parameters(recurse=False) if is_packed(each)]
    undo: list[Callable[[], object]] = []
    for parameter in packed:
        if (state := parameter.quant_state) is not None:
            state.to(device)
            # torch.distributed.checkpoint.state_dict looks keys of a state dict up by `getattr`
            for key, value in state.as_dict(packed=True).items():
                vars(parameter).setdefault(key.partition(".")[0], value)
    if packed:
        undo.append(module.register_load_state_dict_pre_hook(_load_scales).remove)
    if module._parameters.get("bias") is not None and (
        packed or any(hasattr(each, _OF_8_BITS) for each in module.parameters(recurse=False))
    ):
        undo.append(_CastBias(module).remove)
    if packed and getattr(module, _REPACKS, False):
        # It would exchange the memory of what is gathered, and change the shared `quant_state`.
        _set_repacks(module, repacks=False)
        undo.append(partial(_set_repacks, module, repacks=True))
    return undo


class _CastBias:
    """A linear of bitsandbytes casts its bias to the dtype that it computes in, in place
    (`bias.data = ...`): what is gathered would not reach it any more. So in a call it has a cast
    one, which it leaves alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._bias: Tensor | None = None  # in a call, the one that the module has outside
        self._handles = (
            module.register_forward_pre_hook(self._before),
            # before units exchange their parameters
            module.register_forward_hook(self._after, prepend=True, always_call=True),
        )

    def _before(self, module: nn.Module, args: Any) -> None:
        bias = module._parameters["bias"]
        dtype = getattr(module, "compute_dtype", None) or (args[0].dtype if args else None)
        if bias is not None and dtype is not None and bias.dtype != dtype:
            self._bias = bias
            module._parameters["bias"] = bias.to(dtype)  # type: ignore[assignment]

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._bias is not None:
            module._parameters["bias"], self._bias = self._bias, None  # type: ignore[assignment]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _set_repacks(module: nn.Module, *, repacks: bool) -> None:
    setattr(module, _REPACKS, repacks)


def _load_scales(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the entries of packed parameters' `quant_state`, which the module writes and does not
    read.
    """
    for name, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False):
        keys = [key for key in state_dict if key.startswith(f"{name}.")]
        if keys and is_packed(parameter):
            state: Any = parameter.quant_state  # type: ignore[attr-defined]
            entries = {key.removeprefix(f"{name}."): state_dict.pop(key) for key in keys}
            vars(state).update(vars(type(state).from_dict(entries, state.absmax.device)))
            # what `prepare_packed` has put there is of before
            there = {
                key.partition(".")[0]: each for key, each in state.as_dict(packed=True).items()
            }
            vars(parameter).update({**there, "quant_state": state})
