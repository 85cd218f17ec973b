"""The examples of docstrings run: each on two ranks, with a small model of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import inspect
import io
import os
import random
import tempfile
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import composable
from composable import forecast, fsdp2, traversal
from docs.reference import Entry, entries
from tests.helpers.world import Pool

# why these do not run here
NOT_RUN: Final = {
    "HierarchicalAverager": "64 ranks",
    "forecast.calibrate": "an accelerator",
}
ELSEWHERE: Final = {"registry": "'train.py:41'"}  # printed where the call stands


def example_of(thing: Any) -> list[tuple[str, str]]:
    """The statements of a docstring's example, each with what it prints."""
    _, found, text = (inspect.getdoc(thing) or "").partition("\nExample:")
    if not found:
        return []
    first, *lines = text.lstrip(":").lstrip("\n").split("\n")
    body = [first]
    for line in lines:
        if line and not line.startswith(" "):
            break
        body.append(line)
    code = inspect.cleandoc("\n" + "\n".join(body))
    if not code.startswith(">>>"):
        return [(code, "")]
    return [(part.source, part.want) for part in doctest.DocTestParser().get_examples(code)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result

    generate = forward


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _mesh(device: str, shape: tuple[int, ...], **names: Any) -> Any:
    """All ranks in the last dimension, however many the example has."""
    return init_device_mesh("cpu", (1,) * (len(shape) - 1) + (dist.get_world_size(),), **names)


def _loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Part(nn.Module):
    """Takes tokens, or what another part returns."""

    def __init__(self, config: Any, index: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(x if x.is_floating_point() else self.tokens(x))
        return result


def _saved_llama(variables: dict[str, Any]) -> None:
    composable.export(composable.fully_shard(_llama()), "models/llama")
    _of_transformers(variables)


def _of_transformers(variables: dict[str, Any]) -> None:
    variables["model"] = _llama()
    variables["Block"] = type(variables["model"].model.layers[0])  # type: ignore[union-attr, index]
    variables["AutoModelForCausalLM"] = transformers.AutoModelForCausalLM
    variables["config"] = variables["model"].config


def _of_one_width(variables: dict[str, Any]) -> None:
    variables["tp"] = init_device_mesh("cpu", (dist.get_world_size(),))


def _large(variables: dict[str, Any]) -> None:
    variables["model"] = nn.Sequential(nn.Linear(3200, 3200))


def _replicated(variables: dict[str, Any]) -> None:
    composable.replicate(variables["model"])


PREPARED: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "apply_tp_plan": _of_transformers,
    "ModelPolicy": _of_transformers,
    "export": _of_transformers,
    "load": _saved_llama,
    "declare_part": _of_one_width,
    "SizePolicy": _large,
    "PeriodicAverager": _replicated,
    "LocalSteps": _replicated,
}


def _variables(entry: Entry, code: str) -> dict[str, Any]:
    model = Model()
    batches = [torch.randn(2, 4) for _ in range(4)]
    package = fsdp2 if entry.name.startswith("fsdp2.") else composable
    variables: dict[str, Any] = {
        **{name: getattr(composable, name) for name in composable.__all__},
        **{name: getattr(traversal, name) for name in traversal.__all__},
        **{name: getattr(forecast, name) for name in forecast.__all__},
        **({name: getattr(fsdp2, name) for name in fsdp2.__all__} if package is fsdp2 else {}),
        "composable": composable,
        "dataclasses": dataclasses,
        "torch": torch,
        "nn": nn,
        "random": random,
        "transformers": transformers,
        "init_device_mesh": _mesh,
        "Shard": Shard,
        "Join": Join,
        "Block": Block,
        "Embedding": nn.Embedding,
        "Model": Model,
        "Llama": Part,
        "Part": Part,
        "config": None,
        "model": model,
        "batches": iter(batches),
        "loader": batches,
        "batch": batches[0],
        "x": batches[0],
        "prompt": batches[0],
        "tokens": batches[0],
        "extend": lambda tokens, more: tokens,
        "prompts": batches,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "loss_of": _loss_of,
        "step": lambda batch: None,
        "evaluate": lambda model: None,
        "show_name": lambda *_: None,
        "engine": SimpleNamespace(generate=list, load_weight=lambda fqn, tensor: None),
        "accelerator": SimpleNamespace(prepare=lambda *_: None),
        "make_model": Model,
        "make_stage": lambda stage: Part(None, stage),
        "annotate": composable.fully_shard,
        "trainer": SimpleNamespace(train=lambda: None),
        "make_batch": lambda: torch.randn(8, 4),
        "first_stage": Block(),
        "second_stage": Block(),
    }
    PREPARED.get(entry.name, lambda _: None)(variables)
    verbs = ("fully_shard", "apply_tp_plan", "replicate")
    annotated = any(f"{verb}(model" in code for verb in verbs)
    if dist.is_initialized() and not annotated and PREPARED.get(entry.name) is not _replicated:
        variables["fully_shard"](variables["model"])
        variables["state"] = variables["model"].state_dict()
    variables["optimizer"] = torch.optim.AdamW(variables["model"].parameters())
    if "loss.backward" in code:
        variables["loss"] = _loss_of(variables["model"], batches[0])
    if "share_comm_ctx(" in code:
        for stage in (variables["first_stage"], variables["second_stage"]):
            fsdp2.fully_shard(stage)
    return variables


def _run(entry: Entry) -> str:
    """What went wrong; nothing if all is well."""
    parts = example_of(entry.thing)
    file = f"{entry.name}.py"
    try:
        variables = _variables(entry, "".join(code for code, _ in parts))
        for code, want in parts:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if want:
                    value = eval(code, variables)
                    printed.write(f"{value!r}\n" if value is not None else "")
                else:
                    exec(compile(code, file, "exec"), variables)
            if want and entry.name not in ELSEWHERE and printed.getvalue() != want:
                return f"{entry.name}: {code}  printed {printed.getvalue()}  not {want}"
    except Exception:
        return f"{entry.name}: {traceback.format_exc()}"
    return ""


def _in_a_folder(names: list[str]) -> list[str]:
    before = os.getcwd()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    os.chdir(folders[0])
    try:
        return [_run(entry) for entry in entries() if entry.name in names]
    finally:
        os.chdir(before)


def test_every_public_name_has_an_example() -> None:
    assert [entry.name for entry in entries() if not example_of(entry.thing)] == []


def test_the_examples_of_docstrings_run_on_two_ranks(pool: Pool) -> None:
    names = [
        entry.name
        for entry in entries()
        if entry.name not in NOT_RUN and not entry.name.startswith("forecast.")
    ]
    pool.stop()  # `install()` wants a process in which torch's FSDP2 has sharded nothing
    for wrong in pool.run(2, _in_a_folder, names, spoils=True):
        assert not any(wrong), "\n".join(filter(None, wrong))


def test_the_examples_of_forecasts_run_without_ranks() -> None:
    found = [
        entry
        for entry in entries()
        if entry.name.startswith("forecast.") and entry.name not in NOT_RUN
    ]
    wrong = [_run(entry) for entry in found]
    assert not any(wrong), "\n".join(filter(None, wrong))
