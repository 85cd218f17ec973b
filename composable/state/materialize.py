"""`materialize` and `load` give a model memory and values; `refresh` adopts changes by users.

The model was built and annotated on the meta device. Each rank reads its own part of a folder of
safetensors, and initialisers fill only what the folder does not have. First the folder is read
(`folder.py`), and a plan assigns its tensors to the model (`folder_plan.py`). Then the model is
written to (`writing.py`, `initialise.py`). The ranks compare only their arguments and random
states, and whether all of them can read what they need, before anything is written.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn

from composable.api.explicit_calls import units_in
from composable.checked import RealDtype, checked
from composable.compilation import untraced, unwrapped
from composable.engine.edits.written import written
from composable.engine.step.plan import planned_roots
from composable.errors import UnknownArgumentError
from composable.state.folder_plan import Loaded, Rename, plan_folder
from composable.state.initialise import Init, Initialisation
from composable.state.whole import (
    all_or_none,
    checked_on_all_ranks,
    comms_of_model,
    require_at_rest,
)
from composable.state.writing import cast, give_memory, write


@checked_on_all_ranks
def materialize(
    module: nn.Module,
    init: Init | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    dtype: RealDtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Give memory to parameters and buffers on the meta device, and run initialisers.

    The result is one process's weights, sharded.

    Call `torch.manual_seed(seed)` on all ranks before. The weights then have the same bits as in
    one process that sets the same seed and runs `model.to_empty(device=...)` and
    `model.apply(init)`, for every mesh and policy. In addition to the shards, at most the
    parameters of the largest unit are whole at a time. All ranks call this together, after they
    annotate.

    With a folder, this is `load`. Initialisers then run only for modules that have a tensor on the
    meta device that the folder lacks, and for modules around them. Such tensors are buffers that
    are in no state dict, and with `strict=False` parameters, such as those of a new head. If these
    are random, set the seed on all ranks before.

    Args:
        module: an annotated module, or one that contains some. Modules without anything on the meta
            device, at any depth, are not initialised.
        init: called with each module, children first, as by `model.apply`. None: `_init_weights`
            for models of transformers, and otherwise the module's own `reset_parameters`. If an
            initialiser reads or writes the parameters of units below its module, as one for a whole
            model does, these parameters are whole at the same time, too.
        folder: of safetensors, from which values come; see `load`.
        dtype: cast the model to it first; see `load`.
        strict: as for `load`; only with a folder.
        rename: as for `load`; only with a folder.

    Returns:
        Names of the model that the folder lacks (they were initialised), and names of the folder
        that were not used. Both are empty if `strict`, and without a folder.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward; or no initialiser wrote to a parameter or
            buffer, which would then hold uninitialised memory; the error names them.
        ForeignParameterError: an initialiser tied parameters, or untied some.
        RanksDisagreeError: the random states of the ranks differ; or initialisers gave the ranks
            different values, because they draw from NumPy, `random` or a generator with another
            seed on each rank.
        UnknownArgumentError: `strict` or `rename` without a folder.
        FileNotFoundError, StateError, ImportError: as of `load`.

    After an error, set the seed again and call this again. It initialises everything that was on
    the meta device anew.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model(config)
        >>> fully_shard(model, policy={Block})
        >>> torch.manual_seed(0)
        >>> materialize(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    if folder is None and not (strict and rename is None):
        raise UnknownArgumentError(
            "materialize: strict= and rename= say how a folder is read, and there is no folder="
        )
    return _fill("materialize", module, init, folder, dtype, strict, rename)


@checked_on_all_ranks
def load(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: RealDtype | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Read weights from a folder of Hugging Face safetensors into an annotated model.

    Each rank reads its own part, and no rank holds the whole model. `load` is the inverse of
    `export`, and reads what `save_pretrained` writes. All ranks call it together, outside of
    forward and backward. If you pass `dtype`, or the model is on the meta device, call it before
    you create optimizers.

    `load` allocates memory for tensors on the meta device. Of these, it initialises, as
    `materialize` does, buffers that are in no state dict, and with `strict=False` also parameters
    that the folder lacks.

    Args:
        module: an annotated module, or one that contains some.
        folder: a folder with `model.safetensors`, with an index and its files, or with any
            safetensors files; or one such file. Every rank must see it.
        dtype: cast floating-point parameters and buffers of the model to it first, as
            `from_pretrained` does. It does not cast buffers that are in no state dict, or tensors
            that a model of transformers keeps in float32. None: cast the values of the folder to
            the dtypes of the model.
        strict: raise an error if the names in the folder are not those of the model. For tied
            tensors, one name is enough.
        rename: maps the name of a tensor in the folder to its name in the model. None: for a model
            of transformers, rename and stack experts as `from_pretrained` does; otherwise keep the
            names.

    Returns:
        The missing and the unexpected names; both are empty if `strict`.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        PhaseError: inside of a forward or backward; or no initialiser wrote to a buffer that is in
            no state dict and was on the meta device.
        FileNotFoundError: no file of safetensors in `folder`, or one that its index names.
        StateError: names or shapes differ, values cannot be cast (integers are not weights), the
            folder has quantised weights, a name is in two files, two names become one, or a file is
            truncated. All ranks raise, and the model does not change.
        RanksDisagreeError: the folder of another rank does not fit, or has other tensors.
        ImportError: the package `safetensors` is not installed.

    Example:
        >>> fully_shard(model, policy={Block})
        >>> load(model, "models/llama")
        Loaded(missing_keys=[], unexpected_keys=[])
    """
    return _fill("load", module, None, folder, dtype, strict, rename)


@untraced
@checked
def refresh(module: nn.Module) -> None:
    """Adopt what has changed in annotated modules since the last forward, or raise an error.

    The next forward does the same. `refresh` adopts moved, cast, replaced, frozen and unfrozen
    parameters. The next step compares the ranks and agrees on orders again. All ranks call this
    together, outside of forward and backward.

    Args:
        module: an annotated module, or one that contains some.

    Raises:
        NotAnnotatedError: no annotated module in `module`.
        ForeignParameterError, AnnotationError: what the next forward would raise.

    Example:
        >>> model.load_state_dict(state, assign=True)
        >>> refresh(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    units = units_in("refresh", module)
    require_at_rest("refresh", units)
    for root in planned_roots(units):
        root.agree_anew()
    for root in planned_roots(units):
        root.prepare()
    written(units)  # those that were moved or cast have other memory


def _fill(
    verb: str,
    model: nn.Module,
    init: Init | None,
    folder: str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
    strict: bool,
    rename: Rename | None,
) -> Loaded:
    model = unwrapped(model)
    units = units_in(verb, model)
    require_at_rest(verb, units)
    plan = None
    if folder is not None:
        plan = plan_folder(verb, model, units, folder, rename, strict=strict)
    initialisation = Initialisation(verb, model, init, plan)
    initialisation.compare_random_states(units)
    # All ranks have agreed: from here on the model is written to.
    if dtype is not None:
        cast(model, dtype)
    initialisation.begin()
    give_memory(model, units[0].mesh_info.device)
    if plan is None or initialisation.fresh or dtype is not None:
        refresh(model)
    initialisation.run(units)
    if plan is not None:
        all_or_none(verb, comms_of_model(units), partial(write, model, plan))
    initialisation.end()
    written(units)
    return Loaded([], []) if plan is None else plan.left_out
