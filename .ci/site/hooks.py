"""Hooks of the documentation site: pages of all public names, and links that leave docs/."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGES = {"ckpt": "The functions and classes of `ckpt`.", "sharding": "The training runtime."}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_config(config: Any) -> Any:
    """Lists the decisions, by their numbers."""
    folder = ROOT / "docs" / "decisions"
    rows = [f"decisions/{path.name}" for path in sorted(folder.glob("*.md"))]
    design = next(section["Design"] for section in config.nav if "Design" in section)
    design.append({"Decisions": rows})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the reference."""
    for package, said in PACKAGES.items():
        text = "\n\n".join([f"# {package}", said, *_entries(package)])
        files.append(File.generated(config, f"reference/{package}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shows links to files outside docs/ as names of files: the site does not have them."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[3].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        shown = target.relative_to(ROOT)
        return found[2] if found[2].strip("`") in str(shown) else f"{found[2]} (`{shown}`)"

    return LINK.sub(replaced, markdown)


def _entries(package: str) -> Iterator[str]:
    """Yields the block of each public name: functions and classes, then errors."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    is_error = {
        name: inspect.isclass(one) and issubclass(one, BaseException) for name, one in found.items()
    }
    for name in sorted(names, key=lambda name: (is_error[name], name.lower())):
        one = found[name]
        if inspect.ismodule(one):
            yield f"## {package}.{name}\n\n{inspect.getdoc(one)}"
        elif inspect.isclass(one) or inspect.isfunction(one):
            members = "" if is_error[name] else "\n    options: {members: null}"
            yield f"::: {one.__module__}.{one.__qualname__}{members}"
