"""The build hook of the wheel: imports name our packages inside `ckpt`; the rest is unchanged."""

import re
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
MOVED = run_path(str(ROOT / ".ci" / "wheel.py"))["moved"]
NAMES = ROOT / "ckpt" / "sharding"
PACKAGES = ("ckpt", "formats", "sharding", "tools")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from formats import limits", "from ckpt.formats import limits"),
        ("from formats.limits import limits", "from ckpt.formats.limits import limits"),
        ("import sharding", "from ckpt import sharding"),
        ("import sharding as s", "import ckpt.sharding as s"),
        ("import sharding.wrap as w, os", "import ckpt.sharding.wrap as w, os"),
        ("import os, tools.ls as ls", "import os, ckpt.tools.ls as ls"),
        (
            "from \\\n  sharding import (\n    wrap,\n)",
            "from \\\n  ckpt.sharding import (\n    wrap,\n)",
        ),
        ("é = 1; from tools import ls", "é = 1; from ckpt.tools import ls"),
        (
            "if TYPE_CHECKING:\n    from formats import a",
            "if TYPE_CHECKING:\n    from ckpt.formats import a",
        ),
        (
            "def f():\n\timport tools\n\treturn tools",
            "def f():\n\tfrom ckpt import tools\n\treturn tools",
        ),
    ],
)
def test_an_import_of_a_package_names_it_inside_ckpt(source: str, expected: str) -> None:
    assert MOVED(source.encode(), "x.py").decode() == expected


@pytest.mark.parametrize(
    "source",
    [
        "# from formats import limits",
        '"""\nfrom formats import limits\n"""',
        "x = 'import sharding'  # import sharding",
        "from . import formats",
        "from .formats import limits",
        "from ckpt.formats import limits",
        "import formats2, other.formats",
        "from toolsmith import tools",
        "formats = tools.sharding",
    ],
)
def test_everything_else_stays_as_it_is(source: str) -> None:
    assert MOVED(source.encode(), "x.py").decode() == source


@pytest.mark.parametrize("source", ["import sharding.wrap", "import os, sharding"])
def test_an_import_that_would_bind_another_name_is_an_error_with_its_line(source: str) -> None:
    with pytest.raises(SyntaxError, match="alone, or `as` another name") as raised:
        MOVED(f"\n{source}".encode(), "x.py")
    assert (raised.value.filename, raised.value.lineno) == ("x.py", 2)


@pytest.mark.parametrize("source", ["f('formats.limits')", 'f(f"sharding.{name}")'])
def test_a_string_that_names_a_module_is_an_error_with_its_line(source: str) -> None:
    with pytest.raises(SyntaxError, match="names a module") as raised:
        MOVED(f"\n{source}".encode(), "x.py")
    assert raised.value.lineno == 2


@pytest.mark.thorough
def test_every_module_of_the_product_can_be_moved_and_keeps_its_lines() -> None:
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        source = path.read_bytes()
        moved = MOVED(source, str(path))
        back = re.sub(rb"from ckpt import (formats|sharding)\b", rb"import \1", moved)
        back = re.sub(rb"from ckpt\.(formats|sharding|tools)\b", rb"from \1", back)
        assert back == source.replace(b"from ckpt.sharding", b"from sharding")
        assert not re.search(rb"^ *(from|import) (formats|sharding|tools)\b", moved, re.MULTILINE)


@pytest.mark.parametrize("name", ["", *sorted(f".{path.stem}" for path in NAMES.glob("[a-z]*.py"))])
def test_the_repository_has_the_runtime_by_its_name_in_an_installation(name: str) -> None:
    ours, installed = import_module(f"sharding{name}"), import_module(f"ckpt.sharding{name}")
    assert installed.__all__ == ours.__all__
    for public in ours.__all__:
        assert getattr(installed, public) is getattr(ours, public)
