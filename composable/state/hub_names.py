"""How a model of transformers renames and converts the tensors of a folder.

`from_pretrained` renames tensors of older models, and stacks experts that a folder stores one by
one. It does not report names of former buffers, and keeps tensors in float32 if the model declares
this. The rules are in undocumented parts of transformers: the modules `conversion_mapping` and
`core_model_loading`, which PEFT also reads, and two methods of models. Checked on transformers
5.23.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]


@dataclass(slots=True)
class Converted:
    """Tensors of the model that are made of several of the folder, or of parts of one.

    Attributes:
        targets: names in the model.
        sources: names in the folder, each with the pattern that it matches.
    """

    converter: Any
    targets: list[str]
    sources: list[tuple[str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names in the folder."""
        return [name for name, _ in self.sources]

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Whether the model has all that is made."""
        return all(target in state for target in self.targets)

    @property
    def stacks(self) -> bool:
        """Whether row i of what is made comes of the i-th tensor of each pattern, as an expert."""
        from transformers import core_model_loading as loading  # noqa: PLC0415

        first, *more = self.converter.operations
        return (
            isinstance(first, loading.MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(each, loading.Concatenate) and each.dim > 0)
                or (isinstance(each, loading.Transpose) and min(each.dim0, each.dim1) > 0)
                for each in more
            )
        )

    def convert(self, model: nn.Module, read: Read, rows: slice | None = None) -> dict[str, Tensor]:
        """Make the model's tensors of what `read` gives for names in the folder.

        With `rows` make these of what `stacks`, and read no others.
        """
        converter = copy.deepcopy(self.converter)
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in self.sources:
            by_pattern.setdefault(pattern, []).append(name)
        for pattern, names in by_pattern.items():
            for name in names if rows is None else names[rows]:
                converter.add_tensor(self.targets[0], name, pattern, read(name))
        made = converter.convert(self.targets[0], model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers, if that is imported at all."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def by_transformers(
    model: Any, state: dict[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, str], list[Converted]]:
    """Find, by name in the model, that in the folder; and what is converted.

    A name that the model does not have stands for itself.
    """
    # only for models of transformers
    from transformers import conversion_mapping  # noqa: PLC0415
    from transformers import core_model_loading as loading  # noqa: PLC0415

    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    direct: dict[str, str] = {}
    converted: dict[str, Converted] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if pattern is None:
            direct[target if target in state else name] = name
            continue
        converter = by_pattern[pattern]
        first, *more = converter.target_patterns
        targets = [target, *(target.replace(first, each) for each in more)]
        converted.setdefault(target, Converted(converter, targets)).sources.append((name, pattern))
    return direct, [*converted.values()]


def ignored(model: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Leave out of names those that `from_pretrained` does not report, as former buffers."""
    names = SimpleNamespace(missing_keys={*missing}, unexpected_keys={*unexpected})
    model._adjust_missing_and_unexpected_keys(names)
    return (
        [name for name in missing if name in names.missing_keys],
        [name for name in unexpected if name in names.unexpected_keys],
    )


def kept_dtypes(model: Any, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Find the dtypes of what the model declares to have another one than `dtype` then."""
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415

    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, by_group, _ = build_glob_alternation([*plan])
    return {
        name: plan[by_group[str(match.lastgroup)]]
        for name in names
        if (match := pattern.search(name)) is not None
    }
