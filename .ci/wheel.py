"""The build hook of the wheel: all packages of the repository become one package, `ckpt`.

`formats`, `sharding` and `tools` are names that other projects use too
(docs/decisions/038-one-package-is-installed.md). Rules:

1. In the wheel the three lie inside `ckpt`, and import statements name them there. Lines keep their
   numbers.
2. Strings and comments stay as they are. A string that names one of our modules is an error: an
   import by that string would fail.
3. An editable installation has the repository on Python's path, unchanged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = ("formats", "sharding", "tools")
_FROM = re.compile(rb"from(?:\s|\\\r?\n)+")
_MODULE = re.compile(rf"(?:{'|'.join(MOVED)})(?:\.\w*)+")

Edit = tuple[int, int, bytes, bytes]
"""Line from 1, byte in the line, the bytes there, and the bytes in their place."""


class OnePackage(BuildHookInterface):
    """Gives hatchling the rewritten modules in place of those of the repository."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Rewrites the selected modules into a folder that lives as long as the build."""
        if version == "editable":
            return
        self._scratch = TemporaryDirectory()
        for file in self.build_config.builder.recurse_selected_project_files():
            if file.path.endswith(".py"):
                written = Path(self._scratch.name) / file.distribution_path
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_bytes(moved(Path(file.path).read_bytes(), file.relative_path))
                build_data["force_include"][str(written)] = file.distribution_path


def moved(source: bytes, name: str, check_strings: bool = True) -> bytes:
    """Returns a module whose import statements name our packages inside `ckpt`.

    Raises SyntaxError, with the name and line, for an import that cannot be moved, and for a string
    that names one of our modules.

    >>> moved(b"from formats.limits import limits  # formats", "example.py")
    b'from ckpt.formats.limits import limits  # formats'
    """
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source, name)
    if check_strings:
        _check_strings(tree, name)
    for line, column, old, new in sorted(_edits(tree, lines, name), reverse=True):
        text, end = lines[line - 1], column + len(old)
        assert text[column:end] == old, f"{name}, line {line}: {text!r} lacks {old!r}"
        lines[line - 1] = text[:column] + new + text[end:]
    return b"".join(lines)


def _edits(tree: ast.Module, lines: list[bytes], name: str) -> Iterator[Edit]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_moved(node.module) and node.level == 0:
            yield _insertion(lines, node)
        elif isinstance(node, ast.Import):
            yield from _of_import(node, name)


def _check_strings(tree: ast.Module, name: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and _MODULE.fullmatch(str(node.value)):
            raise _refused(node, name, f"{node.value!r} names a module; use __name__ of one")


def _insertion(lines: list[bytes], node: ast.ImportFrom) -> Edit:
    """The edit that puts `ckpt.` before the module, which can be on a later line than `from`."""
    rest = b"".join([lines[node.lineno - 1][node.col_offset :], *lines[node.lineno :]])
    found = _FROM.match(rest)
    assert found is not None
    line = node.lineno + found[0].count(b"\n")
    ahead = len(found[0].rpartition(b"\n")[2])
    return line, ahead + (node.col_offset if line == node.lineno else 0), b"", b"ckpt."


def _of_import(node: ast.Import, name: str) -> Iterator[Edit]:
    for alias in filter(lambda alias: _is_moved(alias.name), node.names):
        if alias.asname is not None:
            yield alias.lineno, alias.col_offset, b"", b"ckpt."
        elif "." not in alias.name and len(node.names) == 1 and node.lineno == alias.lineno:
            yield node.lineno, node.col_offset, b"import", b"from ckpt import"
        else:
            raise _refused(alias, name, f"import {alias.name} alone, or `as` another name")


def _is_moved(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in MOVED


def _refused(node: ast.alias | ast.expr, name: str, said: str) -> SyntaxError:
    return SyntaxError(said, (name, node.lineno, node.col_offset + 1, None))
