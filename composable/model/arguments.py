"""What is wrong with a call of a verb: its target, its arguments, the names it changed; does not know the registry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from composable.compilation import unwrapped
from composable.errors import AnnotationError, NamesChangedError, UnknownArgumentError, closest, few
from composable.model.naming import module_name


def modules_of(name: str, target: Any) -> tuple[nn.Module, ...]:
    """The modules to annotate: not what torch.compile made of them, since compiled or not they are the same."""
    target = unwrapped(target)
    if isinstance(target, nn.Module):
        return (target,)
    if not isinstance(target, (list, tuple)):
        got = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        raise AnnotationError(f"{name}() takes a module or a list of modules, and got {got}")
    if not target:
        raise AnnotationError(f"{name}() takes a module or a list of modules, and got an empty {type(target).__name__}")
    for index, module in enumerate(target):
        if not isinstance(module, nn.Module):
            raise AnnotationError(f"{name}() got a {type(module).__name__} at position {index} of its list of modules")
        if any(module is earlier for earlier in target[:index]):
            raise AnnotationError(f"{name}() got {module_name(module)} twice in its list of modules")
    return tuple(target)


def arguments_of(
    name: str,
    first: str,
    others: Sequence[inspect.Parameter],
    positional: Sequence[Any],
    kwargs: Mapping[str, Any],
    equivalents: Mapping[str, str],
) -> dict[str, Any]:
    """The call's arguments by name, as they were given."""
    takes = [p.name for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    in_place = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(positional) > len(in_place):
        example = f", {takes[len(in_place)]}=..." if len(takes) > len(in_place) else ""
        raise UnknownArgumentError(
            f"{name}() got {1 + len(positional)} positional arguments; write {name}({first}{example}) with keywords"
        )
    asked = dict(zip(in_place, positional, strict=False))
    if not any(p.kind is p.VAR_KEYWORD for p in others):
        for key in kwargs:
            if key in takes:
                continue
            if key in equivalents:
                here = equivalents[key]
                advice = here if " " in here else f"use {here} instead"
                raise UnknownArgumentError(f"{name}() has no argument '{key}'; {advice}")
            near = closest(key, takes)
            hint = f"did you mean '{near[0]}'? It" if near else "it"
            raise UnknownArgumentError(f"{name}() has no argument '{key}'; {hint} takes: {', '.join(takes) or 'none'}")
    for key in kwargs:
        if key in asked:
            raise UnknownArgumentError(f"{name}() got '{key}' twice, by position and by keyword")
    return {**asked, **kwargs}


def names_of(module: nn.Module) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in module.named_parameters(remove_duplicate=False)],
        "buffers": [name for name, _ in module.named_buffers(remove_duplicate=False)],
        "modules": [name for name, _ in module.named_modules(remove_duplicate=False)],
    }


def compare_names(name: str, module: nn.Module, before: Mapping[str, list[str]]) -> None:
    after = names_of(module)
    for kind, old in before.items():
        new = after[kind]
        if old == new:
            continue
        start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        old, new = old[start:], new[start:]
        while old and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        raise NamesChangedError(
            f"{name} changed the names of {kind} in {module_name(module)}, or their order; before: "
            f"{few(old) or 'nothing'}; after: {few(new) or 'nothing'}. It was taken back"
        )
