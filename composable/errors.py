"""The classes of errors, by cause. This file does not import torch.

Every error of the package is a `ComposableError`, and also the built-in exception that a caller
would expect: an error at annotation is a `ValueError`, an error while running is a `RuntimeError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ComposableError(Exception):
    """The root of all errors that this package raises on purpose."""


# --- refused at annotation: the call, or the module it was made on ------------------------------


class AnnotationError(ComposableError, ValueError):
    """The caller's: an annotation was refused; the module is as it was before."""


class AlreadyAnnotatedError(AnnotationError):
    """The caller's: the module, or what it contains, has the same annotation already."""


class ClashError(AnnotationError):
    """The caller's: the module has an annotation that does not go together with this one."""


class NotAnnotatedError(AnnotationError):
    """The caller's: something needs an annotation that the module does not have."""


class NamesChangedError(AnnotationError):
    """The verb's author's: names of parameters, buffers or modules, or their order, changed."""


class PolicyError(AnnotationError):
    """The policy's author's: a policy picks nothing, is not one, or returns what is no answer."""


class ArgumentError(AnnotationError, TypeError):
    """The caller's: an argument is of another kind, or out of its range; nothing is changed."""


class UnknownArgumentError(ArgumentError):
    """The caller's: the function has no such argument, or takes it by keyword only."""


class TiedParametersError(AnnotationError):
    """The caller's: one parameter is used in two units that would each manage it."""


class MeshError(AnnotationError):
    """The caller's: the mesh or process group does not fit the annotation, or does not exist."""


class UnsupportedError(ComposableError, NotImplementedError):
    """The caller's: FSDP2 can do this, and composable cannot; nothing is changed."""


class ForecastError(ComposableError, RuntimeError):
    """The caller's: a program cannot be run without values, or not in this process."""


class OptimizerError(ComposableError, ValueError):
    """The caller's: an optimizer cannot do what was asked of it; it is as it was before."""


class ClippingError(ComposableError, ValueError):
    """The caller's: gradients cannot be clipped as asked; they are as they were before."""


class StateError(ComposableError, RuntimeError):
    """The caller's: a folder of weights does not fit the model; the model is as it was."""


# --- found while running ------------------------------------------------------------------------


class RanksDisagreeError(ComposableError, RuntimeError):
    """The program's: ranks differ in annotations, in weights, or in the order in which they run."""


class CommunicationError(ComposableError, RuntimeError):
    """The machine's or another rank's: a collective failed or timed out."""


class StepLostError(ComposableError, RuntimeError):
    """The program's or the machine's: too many steps in a row were lost, on all ranks alike."""


class PhaseError(ComposableError, RuntimeError):
    """The caller's: something was asked of a unit at a time when it cannot be done."""


class ForeignParameterError(ComposableError, RuntimeError):
    """The caller's: a parameter put into a sharded module cannot take the sharded one's place."""


class OutputError(ComposableError, RuntimeError):
    """The model's: backward cannot be followed through an output, or an output cannot be copied."""


class DifferentiationError(ComposableError, RuntimeError):
    """The caller's: gradients were asked for in a way that sharded parameters do not allow."""


class SavedTensorError(ComposableError, RuntimeError):
    """The program's: what was saved for backward was written to before backward."""


class HooksRemovedError(ComposableError, RuntimeError):
    """The caller's: the hooks that an annotation lives by were removed from its module."""


class CommHookError(ComposableError, RuntimeError):
    """The hook's author's: a communication hook returned something else than reduced gradients."""


class NonFiniteError(ComposableError, RuntimeError):
    """The program's: gradients are infinite or NaN where they must not be; they are unchanged."""


class NotReproducedError(ComposableError, RuntimeError):
    """The machine's: an operator that ran again on the same tensors computed other bits."""


class ReplayError(ComposableError, RuntimeError):
    """The caller's: what `watch` has written cannot be run again."""


# --- words for messages -------------------------------------------------------------------------


def describe_module(module: object, fqn: str | None = None) -> str:
    """Name a module in a few words: `Block 'layers.3'`, or `Block` where its FQN is not known.

    Its repr is never part of it.
    """
    kind = type(module).__name__
    return f"{kind} '{fqn}'" if fqn else kind


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun, or the name of a class."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def kind_of(value: object) -> str:
    """Name what a value is, for a message; never its repr, unless that is short for certain."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return f"the str '{value}'" if len(value) <= 40 else "a str"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        members = list(dict.fromkeys(type(each).__name__ for each in value))
        return f"a {kind} of {few(members, limit=3)}" if value else f"an empty {kind}"
    return with_article(kind)


def unit_name(fqn: str) -> str:
    """Name the unit at `fqn`, below the module that is called: `(root)` for that module itself."""
    return fqn or "(root)"


def first_line(error: object) -> str:
    """Take what an error says in its first line; nothing if it says nothing, or cannot."""
    try:
        return str(error).strip().partition("\n")[0]
    except Exception:  # of a class of the user's; the other ranks wait for what this one says
        return ""


def few(names: Sequence[str], limit: int = 8) -> str:
    """At most `limit` of `names` in one line, with a count of the rest: `a, b and 3 more`."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def still_on_meta(fqn: str, unit_name: str) -> str:
    """Tell of a parameter that is to be computed with before it has values."""
    return (
        f"parameter '{fqn}' of unit '{unit_name}' is still on the meta device: it has a shape, but"
        " no values to compute with. Materialise the model before its first forward: call"
        " model.to_empty(device=...) and initialise it, or model.load_state_dict(state_dict,"
        " assign=True)"
    )


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Ask about the nearest of `choices`: `; did you mean 'mean'?`; nothing when none is near."""
    return "".join(f"; did you mean '{near}'?" for near in closest(str(name), choices))


def what_is_there(name: str, choices: Sequence[str]) -> str:
    """Name the nearest of `choices`, or some of all: `close to it: a, b`; `there is: x, y`."""
    near = closest(name, choices, limit=3)
    return f"close to it: {', '.join(near)}" if near else f"there is: {few(choices) or 'none'}"


def closest(name: str, choices: Iterable[str], limit: int = 1) -> list[str]:
    """Find the `choices` that `name` may be a slip of, best first; none when nothing is near."""
    return difflib.get_close_matches(name, list(dict.fromkeys(choices)), n=limit, cutoff=0.6)
