"""Hooks of the documentation site: pages of all public names, README as the first page, and links.

A page of the reference has each name of the `__all__` of its modules, and each public member of a
class. The build fails if a name is no function, class or known module, or has no docstring.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "ckpt": "The functions and classes of `ckpt`.",
    "sharding": "The training runtime: `from ckpt.sharding import fully_shard`.",
}
SHOWN = {"ckpt": "ckpt", "sharding": "ckpt.sharding"}
"""The names by which users import the packages."""
MODULES = {
    "ckpt": ("state_dict", "events"),
    "sharding": ("composable", "wrap", "comm_hooks", "sharded_grad_scaler"),
}
"""Public modules, which the pages of their packages have too."""
FIRST = ("save", "load", "Checkpointer", "Keep", "latest", "open", "read", "convert")
"""Names with which a page of the reference begins; the others follow by the alphabet."""
BOOSTS = {"In depth": 0.5, "For maintainers and reviewers": 0.1}
"""Sections that the search ranks lower."""
SHIM = "https://unpkg.com/iframe-worker/shim"
"""The address that the theme gives; no page may load a script from another host."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_config(config: Any) -> Any:
    """Lists the decisions, by their numbers, and links to the repository if it has an address."""
    folder = ROOT / "docs" / "decisions"
    rows = [f"decisions/{path.name}" for path in sorted(folder.glob("*.md"))]
    sections = {name: pages for entry in config.nav if isinstance(entry, dict)
                for name, pages in entry.items()}  # fmt: skip
    sections["For maintainers and reviewers"].append({"Decisions": rows})
    command = ["git", "remote", "get-url", "origin"]
    origin = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if origin.startswith("https://"):
        config.repo_url = origin.strip().removesuffix(".git")
        config.repo_name = config.repo_url.removeprefix("https://").partition("/")[2]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the reference."""
    pages = {"command": _commands(), "ckpt.integrations": _integrations()}
    for package, said in PACKAGES.items():
        pages[package] = "\n\n".join([f"# {SHOWN[package]}", said, *_package(package)])
    readme = re.sub(r"\]\((?!https?:)", "](../", (ROOT / "README.md").read_text())
    readme = readme.replace("](../docs/howto)", "](howto/README.md)")
    files.append(File.generated(config, "index.md", content=readme.replace("](../docs/", "](")))
    for name in ("site.css", "worker.js"):
        text = (Path(__file__).parent / name).read_text()
        files.append(File.generated(config, name, content=text))
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Shows links to files outside docs/ as names of files: the site does not have them."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    above = {section.title for section in page.ancestors}
    for section in above & BOOSTS.keys():
        page.meta.setdefault("search", {"boost": BOOSTS[section]})

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[3].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        shown = target.relative_to(ROOT)
        return found[2] if found[2].strip("`") in str(shown) else f"{found[2]} (`{shown}`)"

    return LINK.sub(replaced, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Takes the script with which the search works in files from the site, not from a network."""
    return output.replace(SHIM, "../" * page.url.count("/") + "worker.js")


def _package(package: str) -> Iterator[str]:
    """Yields the blocks of a package, then those of its public modules."""
    yield from _entries(package)
    for name in MODULES[package]:
        said = inspect.getdoc(importlib.import_module(f"{package}.{name}"))
        yield f"## {SHOWN[package]}.{name}\n\n{said}"
        yield from _entries(f"{package}.{name}")


def _entries(module_name: str) -> Iterator[str]:
    """Yields the block of each public name: functions and classes, then errors."""
    module = importlib.import_module(module_name)
    public = {*module.__all__, *(("open",) if module_name == "ckpt" else ())}
    names = [name for name in sorted(public) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    is_error = {
        name: inspect.isclass(one) and issubclass(one, BaseException) for name, one in found.items()
    }
    place = {name: index for index, name in enumerate(FIRST)}
    for name in sorted(
        names, key=lambda name: (is_error[name], place.get(name, len(FIRST)), name.lower())
    ):
        one = found[name]
        if not one.__doc__:
            raise PluginError(f"{module_name}.{name} has no docstring")
        if inspect.isclass(one) or inspect.isfunction(one):
            yield _block(f"{one.__module__}.{one.__qualname__}", with_members=not is_error[name])
        elif name not in (*MODULES.get(module_name, ()), *PACKAGES):
            raise PluginError(f"{module_name}.{name} is a {type(one).__name__}: name it in MODULES")


def _block(name: str, with_members: bool = True) -> str:
    return f"::: {name}" + ("\n    options: {members: null}" if with_members else "")


def _integrations() -> str:
    """The page of the modules for other libraries, which are read and not imported."""
    parts = ["# ckpt.integrations", "One module for each library."]
    for path in sorted((ROOT / "ckpt" / "integrations").glob("*.py")):
        tree = ast.parse(path.read_text())
        lists = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        if lists:
            module = f"ckpt.integrations.{path.stem}"
            parts += [f"## {module}", ast.get_docstring(tree) or ""]
            parts += [_block(f"{module}.{name}") for name in ast.literal_eval(lists[0])]
    return "\n\n".join(parts)


def _commands() -> str:
    """The page of the command line: the help of each command."""
    from tools.main import parser

    os.environ["COLUMNS"] = "96"
    found = parser()
    (commands,) = [
        action.choices
        for action in found._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    parts = ["# The command", f"```text\n{found.format_help()}```"]
    for name, one in commands.items():
        one.epilog = None  # the table of exit codes is above
        parts += [f"## ckpt {name}", f"```text\n{one.format_help()}```"]
    return "\n\n".join(parts)
