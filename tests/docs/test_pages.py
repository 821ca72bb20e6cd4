"""README, the quick start and the how-to pages do what they show: their programs and commands run.

A block `python title="NAME"` is a file. In a block `console`, a line after `$ ` is a command. The
lines below a command are its output, in which `...` stands for any text.
"""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.child import free_ports

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/start.md", *sorted(ROOT.glob("docs/howto/*.md"))]
BLOCK = re.compile(r"^```(python title=\"([^\"]+)\"|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 300


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yields the commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def runnable() -> Iterator[Path]:
    for page in PAGES:
        if "```console" in page.read_text():
            yield page


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", list(runnable()), ids=lambda page: page.stem)
def test_the_commands_of_a_page_have_the_output_that_it_shows(page: Path, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CKPT_RUNTIME_DIR": str(tmp_path / "runtime"),  # names of live states are those of a host
        "PET_MASTER_PORT": str(free_ports(1)[0]),  # torchrun's, beside other tests
    }
    for kind, name, content in BLOCK.findall(page.read_text()):
        if kind != "console":
            (tmp_path / name).write_text(content)
            continue
        for command, expected in commands(content):
            ended = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
            same = doctest.OutputChecker().check_output(expected, ended.stdout, doctest.ELLIPSIS)
            assert same or not expected, f"{command}\n{ended.stdout}\nis not\n{expected}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_are_python(page: Path) -> None:
    for _, name, content in BLOCK.findall(page.read_text()):
        if name:
            compile(content, f"{page.name}:{name}", "exec")
