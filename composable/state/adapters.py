"""Initialise new adapters of PEFT that were made on the meta device.

PEFT initialises adapters when it makes them, and their values are not the defaults of their
modules. On the meta device these values are lost: zeros for LoRA's second matrix, copies of the
original for `modules_to_save`, embeddings of a text for a prompt, and values that are computed from
base weights for others. This file computes the values again if it can, and raises an error that
names the other adapters. Checked on PEFT 0.21.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable.contract.tree import Place
from composable.errors import PhaseError, few
from composable.torch_private import local_tensor

_OF_LORA: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class NewAdapters:
    """Adapters that are without values.

    Attributes:
        inside: by id, modules of adapters, which no method of the model around initialises.
        initialisers: by id of a layer of PEFT's, what fills its adapters.
        left: places that initialisers are to fill; the others become copies.
    """

    def __init__(self, verb: str, model: nn.Module, left: Sequence[Place], *, filled: bool) -> None:
        """Look for them, unless a function of the user's has them `filled`."""
        self.inside: set[int] = set()
        self.initialisers: dict[int, Callable[[], object]] = {}
        self._copies: list[tuple[Place, Place]] = []
        self.left = list(left)
        if left and not filled and "peft" in sys.modules:
            self._look(verb, model)

    def _look(self, verb: str, model: nn.Module) -> None:
        from peft.tuners.lora import LoraLayer  # noqa: PLC0415 - it is imported already
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415
        from peft.utils.other import ModulesToSaveWrapper  # noqa: PLC0415

        kinds = (BaseTunerLayer, ModulesToSaveWrapper)
        # by module, the layer that it is an adapter of, the name there, and that of the adapter
        owners: dict[int, tuple[Any, str, str | None]] = {}
        for layer in model.modules():
            if isinstance(layer, kinds):
                for name, child in layer.named_children():
                    if name not in ("base_layer", "original_module"):
                        owners[id(child)] = layer, name, None
                        for adapter, part in child.named_children():
                            owners.update({id(e): (layer, name, adapter) for e in part.modules()})
        self.inside = {*owners}
        configs, prompts = _configs(model), _made_prompts(model)
        drawn: dict[int, dict[str, Any]] = {}  # by id of a layer of LoRA, how, by adapter
        ordinary: list[Place] = []
        refused: list[Place] = []
        for place in self.left:
            if id(place.module) not in owners:
                # the second: a parameter of the layer itself
                other = id(place.module) in prompts or isinstance(place.module, kinds)
                (refused if other else ordinary).append(place)
                continue
            layer, name, found = owners[id(place.module)]
            adapter = place.name if found is None else found
            init = getattr(configs.get(id(layer), {}).get(adapter), "init_lora_weights", None)
            if isinstance(layer, ModulesToSaveWrapper):
                original = _original(layer, adapter, place)
                if original is None:
                    refused.append(place)
                else:
                    self._copies.append((place, original))
            elif (
                isinstance(layer, LoraLayer)
                and name in _OF_LORA
                and (init in (True, False) or str(init).lower() == "gaussian")
            ):
                ordinary.append(place)
                drawn.setdefault(id(layer), {})[adapter] = init
                self.initialisers[id(layer)] = partial(_fill, layer, drawn[id(layer)])
            else:
                refused.append(place)
        if refused:
            raise PhaseError(
                f"{verb}: {few([repr(place.fqn) for place in refused])} of a new adapter of PEFT is"
                " on the meta device, where PEFT could not initialise it, and no module has an"
                " initialiser that does. Make the adapter on a real device before the annotation,"
                " read it from a folder, or pass materialize(init=) a function that fills it"
            )
        self.left = ordinary

    @torch.no_grad()
    def copy(self) -> None:
        """Fill copies of original modules, once these have values. No message."""
        for to, source in self._copies:
            copy, original = tensor_at(to), tensor_at(source)
            assert copy is not None
            assert original is not None
            local_tensor(copy).copy_(local_tensor(original))


def _fill(layer: Any, adapters: Mapping[str, bool | str]) -> None:
    for adapter, init in adapters.items():
        layer.reset_lora_parameters(adapter, init)


def _configs(model: nn.Module) -> dict[int, Mapping[str, Any]]:
    """By id of a layer, the configurations of its adapters."""
    return {
        id(layer): found
        for holder in model.modules()
        if isinstance(found := vars(holder).get("peft_config"), Mapping)
        for layer in holder.modules()
    }


def _made_prompts(model: nn.Module) -> set[int]:
    """By id, modules of prompts that are more than drawn: embeddings of a text, or zeros."""
    return {
        id(part)
        for holder in model.modules()
        if isinstance(encoders := holder._modules.get("prompt_encoder"), nn.ModuleDict)
        and isinstance(configs := getattr(holder, "peft_config", None), Mapping)
        for adapter, encoder in encoders.items()
        if not _is_drawn(configs.get(adapter))
        for part in encoder.modules()
    }


def _is_drawn(config: Any) -> bool:
    return (
        getattr(config, "peft_type", None) in ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING")
        and getattr(config, "prompt_tuning_init", "RANDOM") == "RANDOM"
        and getattr(config, "init_weights", None) != "zero"
    )


def _original(layer: Any, adapter: str, place: Place) -> Place | None:
    """Find what a place of a copied module is a copy of, if both rest alike."""
    copied = layer.modules_to_save[adapter]
    path = next(name for name, each in copied.named_modules() if each is place.module)
    originals = dict(layer.original_module.named_modules())
    found = Place(originals.get(path, layer), place.name, place.fqn)
    one, other = tensor_at(found), tensor_at(place)
    return found if one is not None and _rests_as(one) == _rests_as(other) else None


def _rests_as(tensor: Tensor | None) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, tensor.device_mesh
    return () if tensor is None else (tensor.shape,)


def tensor_at(place: Place) -> Tensor | None:
    """Return the parameter or buffer that is registered at a place."""
    return place.module._parameters.get(place.name, place.module._buffers.get(place.name))
