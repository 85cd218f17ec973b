"""Add notes to torch's errors in a forward, if a unit is involved that the error does not name."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb
from typing import Final

from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from composable.engine.step.observer import OBSERVERS, Observer
from composable.engine.step.root import Root
from composable.engine.step.unit import Unit, UnitCall
from composable.errors import few

_SEEN: Final = "_composable_seen"  # the attribute of errors that were looked at


class _Explainer(Observer):
    @override
    def raises(self, root: Root, call: UnitCall, error: BaseException) -> None:
        _explain(call.unit, root.units, call.module, error)


def _explain(unit: Unit, units: Sequence[Unit], module: nn.Module, error: BaseException) -> None:
    """Add a note to torch's error if plain and sharded tensors, or tensors of two dtypes, met in
    the forward of `module`, a module of `unit`.

    Args:
        units: that take part in the forward.
    """
    if not isinstance(error, RuntimeError) or hasattr(error, _SEEN):
        return
    setattr(error, _SEEN, True)  # units around the one that raised would blame that one
    names = {below: name for name, below in module.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    readers = [
        owner for owner in reversed(owners) if isinstance(owner, nn.Module) and owner in names
    ] or [module]
    text, low = str(error), unit.spec.mp_policy.param_dtype
    if "mixed torch.Tensor and DTensor" in text:
        at_rest = [
            (f"'{other.name}'", param.info.places)
            for other in units
            for param in other.params
            if not other.step.calls and isinstance(param.registered, DTensor)  # type: ignore[redundant-expr]
        ]
        for reader in readers:
            below, kind = set(reader.modules()), type(reader).__name__
            read = dict.fromkeys(
                name for name, places in at_rest if any(place.module in below for place in places)
            )
            if read:
                error.add_note(
                    f"a {kind} in the forward of unit '{unit.name}' may have read a parameter of"
                    f" another unit ({few([*read])}) outside of that unit's forward, where it is"
                    f" sharded. Then annotate the {kind} as the unit in its place; with a policy,"
                    " leave that one out"
                )
                break
    elif "dtype" in text or "scalar type" in text:
        reader, kind = readers[0], type(readers[0]).__name__
        held = [*reader.named_parameters(recurse=False), *reader.named_buffers(recurse=False)]
        odd = [
            (name, t.dtype)
            for name, t in held
            if low is not None and t.is_floating_point() and t.dtype != low
        ]
        others = [each for each in units if each.spec.mp_policy.param_dtype not in (None, low)]
        if odd:
            error.add_note(
                f"'{f'{names[reader]}.{odd[0][0]}'.lstrip('.')}' of a {kind} is {odd[0][1]}, where"
                f" unit '{unit.name}' computes in {low}. Buffers are cast by"
                f" MixedPrecisionPolicy(buffer_dtype=...); full_precision_classes=({kind},) keeps"
                " the module's dtype; ignored parameters are not cast"
            )
        elif others:
            error.add_note(
                f"unit '{others[0].name}' computes in {others[0].spec.mp_policy.param_dtype}, and"
                f" unit '{unit.name}' does not. What one returns to the other is cast by"
                " MixedPrecisionPolicy(output_dtype=...) of the unit that returns it"
            )


OBSERVERS.add(_Explainer())
