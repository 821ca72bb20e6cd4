"""Imports: no module leads back to itself, and each name that any program imports exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ckpt", "formats", "sharding", "tools")


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a module of the packages."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> dict[str, Path]:
    """Every module of the packages, by its name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


IMPORT = re.compile(r"^ *((?:from [.\w]+ )?import (?:\([^)]*\)|.*))", re.MULTILINE)
"""An import. To parse these alone takes a tenth of the time of whole programs."""


def imports_of(text: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in a program, wherever they stand."""
    for found in IMPORT.finditer(text):
        with suppress(SyntaxError):  # a line of prose that begins as an import does
            [node] = ast.parse(found[1]).body
            assert isinstance(node, ast.Import | ast.ImportFrom)
            yield node


def imported(text: str, names: set[str]) -> Iterator[str]:
    """The modules among `names` that a program imports: at its top, in functions, for types."""
    for node in imports_of(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif node.module in names:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else node.module


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """The names of one circle, the first again at the end; None where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_import_leads_back_to_its_module() -> None:
    found = modules()
    graph = {}
    for name, path in found.items():
        # An example in a docstring imports its own module.
        graph[name] = {*imported(path.read_text(encoding="utf-8"), set(found))} - {name}
    assert len(graph) > 200
    assert circle(graph) is None


@pytest.mark.parametrize(
    "source",
    [
        "from b import x",
        "import b",
        "def f():\n    from b import x",
        "if TYPE_CHECKING:\n    from b import X",
    ],
)
def test_a_circle_is_found_by_its_names(source: str) -> None:
    names = {"a", "b", "c"}
    graph = {"a": set(imported(source, names)), "b": {"c"}, "c": {"a"}}
    found = circle(graph)
    assert found is not None
    assert set(found) == names


def defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The names that statements bind; "*" where they bind more than the source says."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "*" if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))
        else:
            for field in ("body", "handlers", "orelse", "finalbody"):
                yield from defined(getattr(node, field, ()))


@pytest.mark.thorough
def test_each_name_that_a_program_imports_from_the_packages_exists() -> None:
    """Benchmarks and examples are not all run by a test, and no type checker reads them."""
    found = modules()
    names = {name: set(defined(parsed(path).body)) for name, path in found.items()}
    missing = []
    for folder in ("benchmarks", "examples", "tests", ".ci"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in imports_of(path.read_text(encoding="utf-8")):
                if not isinstance(node, ast.ImportFrom) or node.module not in found:
                    continue
                there = names[node.module]
                missing += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not {"*", alias.name} & there and f"{node.module}.{alias.name}" not in found
                ]
    assert missing == []


def test_each_function_that_a_program_names_by_a_string_exists() -> None:
    """`module:name` and `module:Class.name`, as benchmarks and tests of faults write them."""
    found = modules()
    missing = []
    for folder in ("benchmarks", "tests", *PACKAGES):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for module, name in re.findall(r'"((?:\w+\.)+\w+):(\w+)[\w.]*"', text):
                if module in found:
                    names = set(defined(parsed(found[module]).body))
                    if name not in names:
                        missing.append(f"{path.relative_to(ROOT)}: {module}:{name}")
    assert missing == []


@pytest.mark.thorough
def test_a_save_and_a_load_need_no_package_that_a_machine_with_a_gpu_may_lack_nor_dtensor() -> None:
    program = """
import sys
for name in ("aiobotocore", "aiohttp", "boto3", "moto", "s3fs", "safetensors", "zstandard"):
    sys.modules[name] = None  # an import of it is an error
import tempfile, torch, ckpt
model = torch.nn.Linear(2, 2)
with tempfile.TemporaryDirectory() as folder, ckpt.Checkpointer(folder, every_steps=1) as run:
    run.save(1, {"model": model})
    run.wait_until_finished()
    assert run.restore({"model": torch.nn.Linear(2, 2)}) == 1
assert "torch.distributed.tensor" not in sys.modules  # half a second of the first call
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)
