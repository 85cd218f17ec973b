"""The API reference, made of signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import composable
from composable import errors, forecast, fsdp2

CHAPTERS: Final[dict[str, tuple[str, ...]]] = {
    "Verbs": (
        "fully_shard",
        "replicate",
        "apply_tp_plan",
        "declare_part",
        "checkpoint",
        "offload_activations",
        "remove",
    ),
    "Around annotated modules": (
        "unshard",
        "reshard",
        "keep_unsharded",
        "register_forward_method",
        "reset",
    ),
    "Accumulation of gradients": ("no_sync", "reduce_gradients"),
    "Communication hooks": ("register_comm_hook",),
    "State": (
        "materialize",
        "summon_full_params",
        "full_state_dict",
        "stream_full",
        "Streamed",
        "offload_to_host",
        "HostOffload",
        "export",
        "load",
        "EMA",
        "rebind_optimizer",
        "refresh",
    ),
    "Inspection": ("describe", "registry"),
    "Policies": (
        "Policy",
        "ModuleWrapPolicy",
        "SizePolicy",
        "NamePolicy",
        "CustomPolicy",
        "ModelPolicy",
    ),
    "Precision and memory": ("MixedPrecisionPolicy", "CPUOffloadPolicy"),
    "Optimizers": (
        "step_on_shards",
        "step_on_matrices",
        "apply_optimizer_in_backward",
        "OptimizerInBackward",
        "clip_grad_norm_",
    ),
    "Ranks that are not alike": ("join", "joinable", "skipped"),
    "One rank raises": ("together",),
    "What goes wrong in a step": ("watch", "Watch"),
    "Ranks that train apart": (
        "average_parameters",
        "PeriodicAverager",
        "HierarchicalAverager",
        "local_steps",
        "LocalSteps",
    ),
    "Verbs of your own": ("contract", "on_undo"),
}
# of `composable.fsdp2`; its other names are torch's own
FSDP2: Final = (
    "fully_shard",
    "FSDPModule",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "install",
    "Installation",
)
MODULES: Final = ("errors", "traversal")  # the rest of the public names, with chapters of their own

_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Attributes|Example|Examples)::?$")
_ENTRY: Final = re.compile(r"^(\w[\w.]*): (.*)$")


def reference() -> str:
    """The page below its first paragraph."""
    lines: list[str] = []
    for title, names in CHAPTERS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += _entry(name, getattr(composable, name))
    lines += ["## traversal", "", *_paragraphs(composable.traversal), ""]
    for name in composable.traversal.__all__:
        lines += _entry(f"traversal.{name}", getattr(composable.traversal, name))
    lines += ["## forecast", "", *_paragraphs(forecast), ""]
    for name in forecast.__all__:
        if name != "DEVICES":
            lines += _entry(f"forecast.{name}", getattr(forecast, name))
    lines += ["## fsdp2", "", *_paragraphs(fsdp2), ""]
    for name in FSDP2:
        lines += _entry(f"fsdp2.{name}", getattr(fsdp2, name))
    lines += [
        "## errors",
        "",
        *_paragraphs(errors),
        "",
        "| error | is also | meaning |",
        "|---|---|---|",
    ]
    for error in public_errors():
        kinds = ", ".join(
            f"`{base.__name__}`"
            for base in error.__mro__[1:]
            if base not in (Exception, BaseException, object)
        )
        lines.append(f"| `{error.__name__}` | {kinds or '`Exception`'} | {inspect.getdoc(error)} |")
    return "\n".join(lines) + "\n"


def public_errors() -> list[type[Exception]]:
    """In the order of their file."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]


def signature_of(thing: Any) -> str:
    """How it is called, without types: the text below has them."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword_only = keyword_only or parameter.kind is parameter.VAR_POSITIONAL
        parts.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def documented_arguments(thing: Any) -> list[str]:
    """The names that its docstring explains."""
    text = inspect.getdoc(thing) or ""
    section = text.partition("\nArgs:\n")[2]
    names = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        found = re.match(r"    (\w[\w, ]*): ", line)
        if found is not None:
            names += found[1].split(", ")
    return names


def _entry(name: str, thing: Any) -> list[str]:
    kind = "class " if isinstance(thing, type) else ""
    lines = [
        f"### {name}",
        "",
        "```python",
        f"{kind}{name}{signature_of(thing)}",
        "```",
        "",
        *_paragraphs(thing),
        "",
    ]
    if isinstance(thing, type):
        shared = [
            vars(base) for base in reversed(thing.__mro__[1:]) if base.__name__.startswith("_")
        ]
        for method, value in {
            k: v for table in (*shared, vars(thing)) for k, v in table.items()
        }.items():
            if not method.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                called = signature_of(value) if inspect.isfunction(value) else ""
                lines += [
                    f"**`{name}.{method}{called}`**",
                    "",
                    *_paragraphs(getattr(thing, method)),
                    "",
                ]
    return lines


def _paragraphs(thing: Any) -> list[str]:
    """A docstring as Markdown: arguments become lists, examples become code."""
    return list(_converted((inspect.getdoc(thing) or "").splitlines()))


def _converted(text: list[str]) -> Iterator[str]:
    index = 0
    while index < len(text):
        section = _SECTION.match(text[index])
        if section is None:
            yield text[index]
            index += 1
            continue
        body = []
        index += 1
        while index < len(text) and (not text[index] or text[index].startswith(" ")):
            body.append(text[index])
            index += 1
        yield from _section(section[1], inspect.cleandoc("\n" + "\n".join(body)).splitlines())
        if index < len(text):
            yield ""


def _section(title: str, body: list[str]) -> Iterator[str]:
    yield f"**{title}**"
    yield ""
    if title.startswith("Example"):
        yield "```python"
        yield from body
        yield "```"
        return
    for line in body:
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry is not None:
            yield f"* `{entry[1]}`: {entry[2]}"
        elif title == "Returns" or not line.startswith(" "):
            yield line
        else:
            yield f"  {line.strip()}"
