"""The commands `forecast` and `describe`, which say without the ranks what a step needs, and how a
model would be sharded. Both take a model by its name, or by a configuration of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from composable import describe, fully_shard
from composable.errors import ComposableError, ForecastError, few, first_line
from composable.extras.forecast.devices import DEVICES
from composable.extras.forecast.forecast import forecast, simulated_model
from composable.extras.forecast.plans import MOST, Plan, compare, device_with, repeated, suggest

UNITS: Final = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}
DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
TOKENS: Final = 2048
PROGRAM: Final = "python -m composable"
STATUS: Final = (
    "Exit status: 0 if it is answered, also where the model does not fit; 1 if the model does not"
    " run, or nothing that --suggest tried fits; 2 if something was asked for that cannot be done."
)

MakeBatch = Callable[[], Any]


class Refused(Exception):
    """Something was asked for that cannot be done; says what, in a line."""


def add_model(parser: argparse.ArgumentParser, dtype: str) -> None:
    """What names a model.

    Args:
        dtype: of the parameters, where neither the user nor a configuration names one; in words.
    """
    parser.add_argument("model", nargs="?", help="package.module:function that makes the model")
    parser.add_argument(
        "--hf",
        metavar="CONFIG",
        help="config.json of a transformers model, its folder, or its name on a hub, instead",
    )
    parser.add_argument("--ranks", type=positive, required=True, help="of the world")
    parser.add_argument("--policy", help="class name of the units (default: what repeats most)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help=f"of the parameters (default: what the configuration names, else {dtype})",
    )


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = STATUS
    add_model(parser, "bfloat16")
    parser.add_argument("--batch", type=positive, help="sequences per rank (default: 1)")
    parser.add_argument("--tokens", type=positive, help=f"per sequence (default: {TOKENS})")
    parser.add_argument(
        "--inputs",
        nargs="+",
        type=input_of,
        metavar="NAME=SIZES",
        help="what a rank passes to the model instead of tokens, by name: of a vision model"
        " pixel_values=8x3x224x224 labels=8:int64, of a speech model"
        " input_features=8x80x3000 labels=8x448:int64 (default: of the parameters' dtype)",
    )
    parser.add_argument(
        "--device", default="h100", choices=tuple(DEVICES), metavar="NAME",
        help=f"one of {', '.join(DEVICES)}",
    )  # fmt: skip
    parser.add_argument("--memory", type=bytes_of, help="of the device, e.g. 80GB")
    parser.add_argument("--plot", type=Path, help="a picture, e.g. forecast.png")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", action="store_true", help="recompute every unit")
    which.add_argument("--compare", action="store_true", help="the usual plans, side by side")
    which.add_argument(
        "--suggest",
        action="store_true",
        help=f"search for the fastest that fits, by {MOST} forecasts at most",
    )


def bytes_of(text: str) -> int:
    """Read sizes like 80GB or 40GiB."""
    found = re.fullmatch(r"(\d+\.?\d*)\s*([A-Za-z]+)", text.strip())
    size = 0 if found is None else int(float(found[1]) * UNITS.get(found[2].upper(), 0))
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size like 80GB or 40GiB")
    return size


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    with suppress(ValueError):
        if (found := int(text)) >= 1:
            return found
    raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, got {text!r}")


def input_of(text: str) -> tuple[str, list[int], str]:
    """Read a tensor's name, sizes and dtype, which may be empty, of `labels=8x128:int64`."""
    found = re.fullmatch(r"(\w+)=([1-9]\d*(?:x[1-9]\d*)*)(?::(\w+))?", text)
    dtype = found and getattr(torch, found[3] or "int64", None)
    if found is None or not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a name, sizes and, unless it is that of the parameters, a dtype, like"
            " labels=8x128:int64"
        )
    return found[1], list(map(int, found[2].split("x"))), found[3] or ""


def run_forecast(options: Any) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        return answered("forecast", partial(_forecast, options))
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        if options.hf is None:  # the program's own: its traceback says where
            raise
        print(f"{PROGRAM} forecast: the model does not run: {first_line(error)}", file=sys.stderr)
        return 1


def answered(command: str, answer: Callable[[], None]) -> int:
    """Call `answer`, which prints, and say in a line why it cannot; returns the exit status."""
    try:
        answer()
    except (Refused, ComposableError, ValueError) as error:
        print(f"{PROGRAM} {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    return 0


def _forecast(options: Any) -> None:
    if options.plot is not None:
        _check_picture(options.plot)
    if options.inputs and (options.batch or options.tokens):
        raise Refused("--inputs has the sizes of whole tensors: leave --batch and --tokens out")
    check_one_model(options)
    make, make_batch = _of_function(options) if options.hf is None else _of_config(options)
    found = _found(options, make, make_batch)
    print(found)
    if options.plot is not None:
        drawn = found.comparison if options.suggest else found
        drawn.plot(options.plot)
        print(f"picture: {options.plot}")


def check_one_model(options: Any) -> None:
    if (options.model is None) == (options.hf is None):
        raise Refused("name a function that makes the model, or --hf config.json")


def _found(options: Any, make: Callable[[], nn.Module], make_batch: MakeBatch) -> Any:
    device = device_with(options.memory, options.device)
    shared: dict[str, Any] = {"ranks": options.ranks, "device": device, "progress": _say}
    with torch.device("meta"):
        model = make()
    try:
        blocks = blocks_of(model, options.policy)
    except ForecastError as error:
        raise Refused(
            f"no class of modules repeats in the {type(model).__name__}: say by --policy which one"
            " the units are of"
        ) from error
    if options.suggest:
        return suggest(make, make_batch, block=blocks[0] if options.policy else None, **shared)
    if options.compare:
        return compare(make, _plans(blocks), make_batch, **shared)

    plan = Plan("fully_shard", blocks, recomputed=(1 << 20) if options.checkpoint else 0)
    return forecast(make, plan.annotate, make_batch, **shared)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _check_picture(path: Path) -> None:
    """Before the forecast, which takes its time."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise Refused(
            "--plot: matplotlib is missing; pip install 'torch-composable[demo]' brings it"
        ) from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise Refused(f"--plot {path}: the name must end like .png; known are {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise Refused(f"--plot {path}: there is no directory {path.parent}")


def _plans(blocks: tuple[type[nn.Module], ...]) -> dict[str, Callable[..., object]]:
    return {
        "replicate": Plan("replicate", blocks).annotate,
        "fully_shard, kept": Plan("fully_shard", blocks, keep=True).annotate,
        "fully_shard": Plan("fully_shard", blocks).annotate,
        "fully_shard, all recomputed": Plan("fully_shard", blocks, recomputed=1 << 20).annotate,
    }


def _batch_of(options: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `--inputs` names."""
    return {
        name: torch.zeros(sizes, dtype=getattr(torch, given) if given else dtype)
        for name, sizes, given in options.inputs
    }


def function_of(text: str, default: str) -> Callable[..., Any]:
    """Import `package.module:function`; `default` is the function's name where none is given."""
    module, _, name = text.partition(":")
    if "/" in module or module.endswith(".py"):
        raise Refused(
            f"{text}: name the module as Python imports it, as in"
            f" {Path(module).stem}:{name or default}, from the directory in which it is"
        )
    sys.path.insert(0, "")  # as `python -m` of the user's own programs
    try:
        function: Callable[..., Any] = getattr(import_module(module), name or default)
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(first_line(error)) from error
    return function


def maker_of(options: Any, dtype: torch.dtype | None) -> Callable[[], nn.Module]:
    """The function that makes the model, in `dtype` unless the user names one."""
    function = function_of(options.model, "make_model")
    if not callable(function):
        raise Refused(f"{options.model} is no function that makes the model")
    try:
        signature(function).bind()
    except TypeError as error:
        raise Refused(
            f"{options.model} is called without arguments, and there is {first_line(error)}; name a"
            " function that passes them"
        ) from error
    except ValueError as error:
        raise Refused(first_line(error)) from error
    chosen = getattr(torch, options.dtype) if options.dtype else dtype

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(chosen or before)
        try:
            model: nn.Module = function()
        finally:
            torch.set_default_dtype(before)
        return model

    return make


def _of_function(options: Any) -> tuple[Callable[[], nn.Module], MakeBatch]:
    dtype = getattr(torch, options.dtype or "bfloat16")

    def make_batch() -> Any:
        if options.inputs:
            return _batch_of(options, dtype)
        return torch.zeros(options.batch or 1, options.tokens or TOKENS, dtype=torch.int64)

    return maker_of(options, dtype), make_batch


def configured(options: Any) -> tuple[Any, Any, torch.dtype]:
    """A class of transformers, that the configuration names, else a causal one; the configuration;
    and the dtype of the parameters.
    """
    path = Path(options.hf)
    path = path / "config.json" if path.is_dir() else path
    on_hub = not path.is_file() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", options.hf)
    if not path.is_file() and (not on_hub or path.suffix == ".json"):
        raise Refused(f"--hf {options.hf}: there is no such file")
    try:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(options.hf if on_hub else str(path))
    except (OSError, ImportError, ValueError, KeyError) as error:
        here = "no such file or folder is here, and the hub did not give it: " if on_hub else ""
        raise Refused(f"--hf {options.hf}: {here}{first_line(error)}") from error
    config.use_cache = False
    dtype = getattr(torch, options.dtype) if options.dtype else config.dtype or torch.bfloat16
    names = list(config.architectures or ())
    kind = next((found for name in names if (found := getattr(transformers, name, None))), None)
    if kind is None:
        mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            what = ", ".join(names) or type(config).__name__
            raise Refused(
                f"--hf {options.hf}: transformers has no model {what} that predicts tokens; name"
                ' the class in "architectures" of the configuration'
            )
        kind = mapping[type(config)]
    return kind, config, dtype


def made_of_config(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = kind._from_config(config, dtype=dtype)
    return model.train()


def _of_config(options: Any) -> tuple[Callable[[], nn.Module], MakeBatch]:
    kind, config, dtype = configured(options)
    make = partial(made_of_config, kind, config, dtype)
    if options.inputs:
        return make, lambda: _batch_of(options, dtype)
    wanted = signature(kind.forward).parameters
    if missing := [name for name in ("input_ids", "labels") if name not in wanted]:
        raise Refused(
            f"{kind.__name__} takes no {' and no '.join(missing)}: say by --inputs what it is"
            f" trained on, e.g. --inputs {example_of(kind, config)}. It takes"
            f" {few([name for name in wanted if name not in ('self', 'kwargs')])}"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most and options.tokens and options.tokens > most:
        raise Refused(
            f"--tokens {options.tokens}: the model is made for {most} tokens"
            " (max_position_embeddings in its configuration). Ask for fewer, or change the"
            " configuration, with what its positions need for longer ones"
        )
    sizes = options.batch or 1, options.tokens or min(TOKENS, most or TOKENS)

    def make_batch() -> dict[str, Tensor]:
        tokens = torch.zeros(sizes, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    return make, make_batch


def example_of(kind: Any, config: Any) -> str:
    """What `--inputs` may be for a model that takes no tokens, of a batch of 8."""
    name = kind.main_input_name
    edge = getattr(config, "image_size", None) or 224
    sizes = {
        "pixel_values": (getattr(config, "num_channels", 3), edge, edge),
        "input_features": (
            getattr(config, "num_mel_bins", 80),
            2 * getattr(config, "max_source_positions", 1500),
        ),
        "input_values": (16000,),
    }
    said = [f"{name}={'x'.join(map(str, (8, *sizes[name])))}" if name in sizes else f"{name}=SIZES"]
    if "labels" in signature(kind.forward).parameters:
        classes = "Classification" in kind.__name__
        length = getattr(config, "max_target_positions", None) or 128
        said.append("labels=8:int64" if classes else f"labels=8x{length}:int64")
    return " ".join(said)


def blocks_of(model: nn.Module, name: str | None) -> tuple[type[nn.Module], ...]:
    if name is None:
        return repeated(model)
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    if name not in kinds:
        raise Refused(f"--policy {name}: the model has {few(sorted(kinds), 20)}")
    return (kinds[name],)


# --- describe ------------------------------------------------------------------------------------


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "what the function makes")
    parser.add_argument(
        "--annotate",
        help="package.module:function that annotates the model, and may take the mesh (default:"
        " fully_shard with the units of --policy; the model as one unit if nothing repeats)",
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        type=dimension_of,
        metavar="NAME=SIZE",
        help="dimensions, e.g. replicate=4 shard=16 (default: one over all ranks)",
    )
    parser.add_argument("--by", choices=("parameter", "unit"), default="parameter")
    parser.add_argument("--json", action="store_true", help="plain values in place of a table")


def dimension_of(text: str) -> tuple[str, int]:
    """Read `shard=16`."""
    found = re.fullmatch(r"(\w+)=([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: write a name and a size, like shard=16")
    return found[1], int(found[2])


def run_describe(options: Any) -> int:
    """Print the description; returns the exit status."""
    return answered("describe", partial(_describe, options))


def _describe(options: Any) -> None:
    check_one_model(options)
    if options.annotate and options.policy:
        raise Refused("--annotate picks the units itself: leave --policy out")
    if options.hf is None:
        make = maker_of(options, None)
    else:
        make = partial(made_of_config, *configured(options))
    if options.annotate:
        annotate = function_of(options.annotate, "annotate")
    else:
        annotate = _plan_of(make, options.policy)
    mesh = dict(options.mesh) if options.mesh else None
    with simulated_model(make, annotate, ranks=options.ranks, mesh=mesh) as model:
        found = describe(model, by=options.by)
    try:
        _show_description(json.dumps(found.to_dict()) if options.json else found)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plan_of(make: Callable[[], nn.Module], policy: str | None) -> Callable[..., object]:
    with torch.device("meta"):
        model = make()
    try:
        return Plan("fully_shard", blocks_of(model, policy)).annotate
    except ForecastError:  # nothing repeats
        return lambda model, mesh: fully_shard(model, mesh=mesh)


def _show_description(found: object) -> None:
    """Print a table, in a terminal as one of rich where it is installed; or text as it is."""
    if sys.stdout.isatty() and not isinstance(found, str):
        with suppress(ModuleNotFoundError):
            import_module("rich.console").Console().print(found)
            return
    print(found)
