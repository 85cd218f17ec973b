"""The `forecast` command: a model by its name, or by a configuration of transformers."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composable.api.checkpoint import checkpoint
from composable.api.fully_shard import fully_shard
from composable.errors import ComposableError
from composable.forecast.devices import DEVICES, device_of
from composable.forecast.forecast import forecast
from composable.forecast.plans import Plan, compare, repeated, suggest

UNITS = {"GB": 10**9, "GIB": 1 << 30, "MB": 10**6, "MIB": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="package.module:function that makes the model")
    parser.add_argument("--hf", type=Path, help="config.json of a transformers model, instead")
    parser.add_argument("--ranks", type=int, required=True, help="of the world")
    parser.add_argument("--policy", help="class name of the units (default: what repeats most)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=2048, help="per sequence")
    parser.add_argument("--device", default="h100", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--memory", type=bytes_of, help="of the device, e.g. 80GB")
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters")
    parser.add_argument("--plot", type=Path, help="a picture, e.g. forecast.png")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", action="store_true", help="recompute every unit")
    which.add_argument("--compare", action="store_true", help="the usual plans, side by side")
    which.add_argument("--suggest", action="store_true", help="search for the fastest that fits")


def bytes_of(text: str) -> int:
    """Read sizes like 80GB or 40GiB."""
    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size like 80GB or 40GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def run(options: Any) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        make_model, loss = _model_of(options)
        dtype = getattr(torch, options.dtype)
    except (OSError, ImportError, AttributeError, ValueError) as error:
        print(f"python -m composable forecast: {error}", file=sys.stderr)
        return 2

    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return make_model()
        finally:
            torch.set_default_dtype(before)

    def make_batch() -> Tensor:
        return torch.zeros(options.batch, options.tokens, dtype=torch.int64)

    def say(plan: str) -> None:
        print(f"  trying: {plan}", file=sys.stderr, flush=True)

    try:
        device = device_of(options.device)
        if options.memory is not None:
            device = replace(device, capacity=options.memory)
        shared: dict[str, Any] = {"ranks": options.ranks, "device": device, "loss": loss}
        with torch.device("meta"):
            blocks = _blocks_of(make(), options.policy)
        found: Any
        if options.suggest:
            found = suggest(
                make,
                make_batch,
                block=blocks[0] if options.policy else None,
                progress=say,
                **shared,
            )
        elif options.compare:
            found = compare(make, _plans(blocks), make_batch, **shared)
        else:

            def annotate(model: nn.Module) -> None:
                if options.checkpoint:
                    checkpoint(model, policy=set(blocks))
                fully_shard(model, policy=set(blocks))

            found = forecast(make, annotate, make_batch, **shared)
    except (ComposableError, ValueError) as error:
        print(f"python -m composable forecast: {error}", file=sys.stderr)
        return 1
    print(found)
    if options.plot is not None:
        drawn = found.comparison if options.suggest else found
        drawn.plot(options.plot)
        print(f"picture: {options.plot}")
    return 0


def _plans(blocks: tuple[type[nn.Module], ...]) -> dict[str, Callable[..., object]]:
    plans = [
        Plan("replicate", blocks),
        Plan("fully_shard", blocks, keep=True),
        Plan("fully_shard", blocks),
        Plan("fully_shard", blocks, recomputed=1 << 20),
    ]
    names = ("replicate", "fully_shard, kept", "fully_shard", "fully_shard, all recomputed")
    return {name: plan.annotate for name, plan in zip(names, plans, strict=True)}


def _model_of(options: Any) -> tuple[Callable[[], nn.Module], Callable[..., Tensor] | None]:
    if (options.model is None) == (options.hf is None):
        raise ValueError("name a function that makes the model, or --hf config.json")
    if options.hf is not None:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(str(options.hf))
        config.use_cache = False

        def make() -> nn.Module:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
            return model.train()

        return make, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss
    module, _, name = options.model.partition(":")
    sys.path.insert(0, "")  # as `python -m` of the user's own programs
    function = getattr(import_module(module), name or "make_model")
    return function, None


def _blocks_of(model: nn.Module, name: str | None) -> tuple[type[nn.Module], ...]:
    if name is None:
        return repeated(model)
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    if name not in kinds:
        raise ValueError(f"--policy {name}: the model has {', '.join(sorted(kinds))}")
    return (kinds[name],)
