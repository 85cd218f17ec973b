"""Build the site into `build/site`: `python -m docs.site.build`, or `make docs`.

The pages are those that are read on GitHub. They are copied to `build/pages`, in the folders where
they are, with what the site adds: a page for each public name, made of its docstring; a page for
each file that a page links to; the order of pages, which is that of `docs/index.md`. Sphinx makes
the site of these. Its warnings are errors, so a link that leads nowhere is one.
"""

from __future__ import annotations

import re
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Final

from docs.reference import entries, page, page_of_errors, reference

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PAGES: Final = ROOT / "build" / "pages"
SITE: Final = ROOT / "build" / "site"
INVENTORY: Final = ROOT / "build" / "torch.inv"
TORCH: Final = "https://docs.pytorch.org/docs/stable/"

_FENCE: Final = re.compile(r"^ *(```+)[^\n]*\n.*?^ *\1\s*$", re.M | re.S)
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)[^)\s]*\)")
_CODE: Final = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_REFERENCE: Final = re.compile(r"(<!-- reference:begin -->\n).*(<!-- reference:end -->)", re.S)
_FILE: Final = "---\norphan: true\nnosearch: true\n---\n\n"  # pages of files are found by links
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}


def inventory_of_torch() -> dict[str, tuple[str, str]]:
    """For links into torch's pages. Without a network there are none, which is no error."""
    if not INVENTORY.exists():
        try:
            with urllib.request.urlopen(f"{TORCH}objects.inv", timeout=5) as answer:
                content = answer.read()
            if not content.startswith(b"# Sphinx inventory"):
                raise OSError("another page answered")
            INVENTORY.parent.mkdir(exist_ok=True)
            INVENTORY.write_bytes(content)
        except OSError:
            sys.stdout.write("docs: torch's pages were not reached; no links lead there\n")
            return {}
    return {"torch": (TORCH, str(INVENTORY))}


def links(text: str) -> list[tuple[str, str, str]]:
    """`!` or nothing, text and path of the links of a page to other files."""
    prose = _CODE.sub(lambda code: code[1].replace("](", ""), _FENCE.sub("", text))
    return [
        (mark, " ".join(shown.split()), link)
        for mark, shown, link in _LINK.findall(prose)
        if not re.match(r"[a-z]+:", link)
    ]


def _resolved(page: str, link: str) -> str:
    path = (ROOT / page).parent / link
    return str(path.resolve().relative_to(ROOT))


def collected() -> tuple[dict[str, str], set[str]]:
    """The text of each page of the site by path, and the pictures on them."""
    texts: dict[str, str] = {}
    pictures = set()
    waiting = ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    while waiting:
        name = waiting.pop()
        if name in texts or name.removesuffix(".md") + "/index.md" in texts:
            continue
        path = ROOT / name
        if path.suffix == ".md":
            texts[name] = path.read_text()
            for picture, _, link in links(texts[name]):
                target = _resolved(name, link)
                if picture or target.endswith(".png"):
                    pictures.add(target)
                else:
                    waiting.append(target)
        elif path.is_dir():
            files = [file.name for file in sorted(path.iterdir()) if file.is_file()]
            listed = "\n".join(f"* [{file}]({path.name}/{file})" for file in files)
            texts[f"{name}.md"] = _FILE + f"# {name}\n\n{listed}\n"
            waiting += [f"{name}/{file}" for file in files]
        else:
            language = _LANGUAGES.get(path.suffix, "text")
            code = f"``````{language}\n{path.read_text()}``````"
            texts[f"{name}.md"] = _FILE + f"# {name}\n\n{code}\n"
    return texts, pictures


def uses(text: str, name: str) -> bool:
    """Whether a page has `name` as code: between backticks, called, or imported."""
    code = re.escape(name)
    as_code = rf"`(composable\.)?{code}[`(]|(?<![\w.]){code}\(|import [^\n]*\b{code}\b"
    return name in text and re.search(as_code, text) is not None


def _toctree(caption: str, listed: list[str]) -> str:
    options = f":caption: {caption}\n" if caption else ""
    return "\n".join(["", "```{toctree}", ":hidden:", f"{options}", *listed, "```", ""])


def order(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The headings of `docs/index.md`, each with the titles and files of the pages below it."""
    _, *sections = re.split(r"^## +", index, flags=re.M)
    found = []
    for section in sections:
        title, _, body = section.partition("\n")
        listed = [(text, _resolved("docs/index.md", link)) for _, text, link in links(body)]
        if listed:
            found.append((title, listed))
    return found


def composed() -> tuple[dict[str, str], set[str]]:
    """All pages of the site by path, and the pictures on them."""
    texts, pictures = collected()
    ordered = order(texts["docs/index.md"])
    placed = {file: title for _, section in ordered for title, file in section}
    for file in texts:
        if not texts[file].startswith("---") and file not in (
            *placed,
            "README.md",
            "docs/index.md",
        ):
            texts[file] = f"---\norphan: true\n---\n\n{texts[file]}"
    _add_reference(texts, {file: placed[file] for file in placed if "guides/" in file})
    texts["README.md"] += _toctree("", ["All pages <docs/index>"])
    for caption, section in ordered:
        listed = [f"{title} <{file.removesuffix('.md')}>" for title, file in section]
        texts["README.md"] += _toctree(caption, listed)
    return texts, pictures


def _add_reference(texts: dict[str, str], guides: dict[str, str]) -> None:
    """A page for each public name, which leads to the guides that use it, and they to it."""
    names = entries()
    users = {
        found.name: [file for file in guides if uses(texts[file], found.name)] for found in names
    }
    for file in guides:
        up = "../" * (file.count("/") - 1)
        used = [
            f"[`{found.name}`]({up}reference/{found.file}.md)"
            for found in names
            if file in users[found.name]
        ]
        if used:
            texts[file] += f"\n---\n\nIn the reference: {', '.join(used)}\n"
    for found in names:
        shown = [f"[{guides[f]}](../{f.removeprefix('docs/')})" for f in users[found.name]]
        below = f"Guides that use it: {', '.join(shown)}\n" if shown else ""
        texts[f"docs/reference/{found.file}.md"] = page(found, below)
    texts["docs/reference/errors.md"] = page_of_errors()
    made = reference(lambda found: f"reference/{found.file}.md")
    listed = [f"{found.name} <reference/{found.file}>" for found in names]
    texts["docs/reference.md"] = _REFERENCE.sub(
        lambda match: f"{match[1]}{made}{match[2]}", texts["docs/reference.md"]
    ) + _toctree("", [*listed, "reference/errors"])


def dead_links(texts: dict[str, str], pictures: set[str]) -> list[str]:
    """Links to files that are no page of the site."""
    there = {*texts, *pictures, *(file.removesuffix(".md") for file in texts)}
    return [
        f"{file}: {link}"
        for file, text in texts.items()
        for _, _, link in links(text)
        if _resolved(file, link) not in there
    ]


def write() -> None:
    """Write the pages; what did not change keeps its time, and Sphinx does not read it again."""
    texts, pictures = composed()
    for file in PAGES.rglob("*"):
        name = str(file.relative_to(PAGES))
        if file.is_file() and name not in texts and name not in pictures:
            file.unlink()
    for name, text in texts.items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for name in pictures:
        (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, PAGES / name)


def main() -> int:
    from sphinx.cmd.build import main as sphinx  # noqa: PLC0415 the pages are checked without it

    write()
    failed = sphinx(
        ["-q", "-W", "--keep-going", "-j", "2", "-c", str(Path(__file__).parent)]
        + ["-d", str(ROOT / "build" / "doctrees"), str(PAGES), str(SITE)]
    )
    if not failed:
        shutil.copy(SITE / "README.html", SITE / "index.html")
        sys.stdout.write(f"docs: {(SITE / 'index.html').relative_to(ROOT)}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
