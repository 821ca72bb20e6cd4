"""The build hook of the wheel: imports name our packages inside `ckpt`; the rest is unchanged."""

import builtins
import json
import re
import shutil
import site
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

import ckpt

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


def test_an_import_of_all_names_hides_no_builtin() -> None:
    for module in (ckpt, ckpt.sharding, ckpt.state_dict, ckpt.events):
        assert [name for name in module.__all__ if hasattr(builtins, name)] == []
    assert "open" in dir(ckpt)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the wheel is installed, beside torch."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_a_program_of_a_user_and_every_public_name_have_types(
    installed: Path, tmp_path: Path
) -> None:
    program = Path(shutil.copy(Path(__file__).with_name("typed_program.py"), tmp_path))
    names = [
        f"{module.__name__}.{name}"
        for module in (ckpt, ckpt.sharding, ckpt.state_dict, ckpt.events)
        for name in dir(module)
        if name in (*module.__all__, "open")
    ]
    imports = "import ckpt\nimport ckpt.sharding\nimport ckpt.state_dict\nimport ckpt.events\n"
    words = set(re.findall(r"\w+", program.read_text()))
    assert [name for name in ckpt.__all__ if name not in words] == []
    every = tmp_path / "every.py"
    every.write_text(imports + "".join(f"reveal_type({name})\n" for name in names))
    options = (f"--cache-dir={tmp_path}/mypy", f"--python-executable={installed}")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *options, program, every],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    lines = [line for line in checked.stdout.splitlines() if "Revealed type is" in line]
    untyped = [line for line in lines if re.search(r'is "(Any|object)"$', line)]
    assert (checked.returncode, untyped, len(lines)) == (0, [], len(names)), checked.stdout


@pytest.mark.slow
def test_a_program_of_a_user_passes_pyright(installed: Path, tmp_path: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("no pyright here: pip install 'pyright[nodejs]'")
    shutil.copy(Path(__file__).with_name("typed_program.py"), tmp_path)
    torch_s = {"reportUnknownMemberType": False}  # the step of an optimizer has no types
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", **torch_s})
    )
    command = [pyright, f"--pythonpath={installed}", "typed_program.py"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
