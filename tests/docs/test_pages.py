"""README and the pages do what they show: their programs, commands and blocks of code run.

A block `python title="NAME"` is a file. In a block `console`, a line after `$ ` is a command. The
lines below a command are its output, in which `...` stands for any text. One shell runs all
commands of a page. Below `<!-- numbers differ -->` the numbers of an output may be others.

The blocks `python` without a title run one after the other, with the names of PRELUDE, which stand
for a program of the reader; one below `<!-- not run: REASON -->` is compiled only.
`<!-- run: CODE -->` makes the files and names that a block needs, and is not shown.
"""

import ast
import builtins
import doctest
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.dcp
import ckpt.sharding
from tests.stores.child import free_ports
from tests.stores.server import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/howto/*.md"))]
BLOCK = re.compile(
    r"^(<!-- numbers differ -->\n+)?```(python title=\"([^\"]+)\"|console)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"^(<!-- not run: .*? -->\n+)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"^<!-- run: (.*?)\s-->$", re.MULTILINE | re.DOTALL)
TRAIN = next(match[4] for match in BLOCK.finditer(PAGES[0].read_text()) if match[3] == "train.py")
"""The program of README: the quick start shows it again, and other pages only use it."""
STARTS = r"```console\n\$ (python|torchrun)"
"""A page with it shows programs that run."""
SECONDS = 300
MARK = "--- the command has ended ---"
PRELUDE = """\
import os, sys, time
from contextlib import suppress
from pathlib import Path
os.chdir(sys.argv[1])
import torch
import torch.distributed as dist
from torch import nn
import ckpt
import ckpt.sharding
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

def made():
    net = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(2, 16)).sum().backward()
    optim.step()
    return net, optim

model, optim = made()
module, optimizer = other_model, other_optim = made()
step, last, rank = 100, 100, 0
progress = {"step": step}
state = {"model": model, "optim": optim, "progress": progress}
scheduler = torch.optim.lr_scheduler.StepLR(optim, 10)
class Loader:
    def state_dict(self): return {"left": [1, 2]}
    def load_state_dict(self, state): self.state = state
loader = Loader()
def train(step=0): return 1.0
for name in ("runs/step-100", "runs/step-300", "runs/gpt/step-1000", "runs/base/step-500"):
    ckpt.save(name, state)
"""
"""The program in which the blocks of a page stand."""


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yields the commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def shape(output: str) -> str:
    """The output with each number as N, and without the lines that are then repetitions."""
    lines = re.sub(r"\d+(\.\d+)?", "N", output).splitlines(keepends=True)
    return "".join(line for line, _ in itertools.groupby(lines))


def pages_with(pattern: re.Pattern[str] | str) -> list[Path]:
    return [page for page in PAGES if re.search(pattern, page.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", pages_with(r"```console\n\$ (python|torchrun)"), ids=lambda page: page.stem
)
def test_the_commands_of_a_page_have_the_output_that_it_shows(page: Path, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CKPT_RUNTIME_DIR": str(tmp_path / "runtime"),  # names of live states are those of a host
        "PET_MASTER_PORT": str(free_ports(1)[0]),  # torchrun's, beside other tests
    }
    (tmp_path / "train.py").write_text(TRAIN)
    expected = []
    script = ["set -euo pipefail"]
    for any_numbers, kind, name, content in BLOCK.findall(page.read_text()):
        if kind != "console":
            (tmp_path / name).write_text(content)
            continue
        for command, output in commands(content):
            script += [command, f"printf '%s\\n' '{MARK}'"]
            expected.append((command, output, bool(any_numbers)))
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS * 3,
        check=False,
    )
    outputs = ended.stdout.split(f"{MARK}\n")
    assert ended.returncode == 0, f"{expected[len(outputs) - 1][0]}\n{outputs[-1]}{ended.stderr}"
    for (command, shown, any_numbers), output in zip(expected, outputs, strict=False):
        texts = [shape(text) if any_numbers else text for text in (shown, output)]
        same = doctest.OutputChecker().check_output(*texts, doctest.ELLIPSIS)
        assert same or not shown, f"{command}\n{output}\nis not\n{shown}"


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(CODE), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_they_are_pasted(
    page: Path, tmp_path: Path, moto: Server, programs: Callable[..., Any]
) -> None:
    text = HIDDEN.sub(r"```python\n\1\n```", page.read_text())
    blocks = [code for not_run, code in CODE.findall(text) if not not_run]
    labelled = [f"exec(compile({code!r}, 'block {n}', 'exec'))" for n, code in enumerate(blocks, 1)]
    code = "\n".join([PRELUDE, *labelled]).replace("s3://bucket", moto.url(page.stem))
    code = re.sub(r"/dev/shm|/local/disk", str(tmp_path), code)
    environment = {
        **moto.environment,
        "CKPT_RUNTIME_DIR": str(tmp_path / "live"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    ended = programs(code, tmp_path, **environment)
    output, errors = ended.communicate()
    assert ended.returncode == 0, f"{output}{errors}"


@pytest.mark.slow
def test_the_command_that_prints_the_seconds_of_readme_exists_with_its_options() -> None:
    readme = PAGES[0].read_text()
    (command,) = re.findall(r"^`python (benchmarks/.*?)` prints", readme, re.MULTILINE)
    ended = subprocess.run(
        [sys.executable, *command.split(), "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert set(re.findall("--[a-z-]+", command)) <= set(re.findall("--[a-z-]+", ended.stdout))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_compiles_and_names_nothing_that_ckpt_lacks(page: Path) -> None:
    text = page.read_text()
    named = [content for *_, name, content in BLOCK.findall(text) if name]
    assert all(content == TRAIN for *_, name, content in BLOCK.findall(text) if name == "train.py")
    for content in [*named, *(code for _, code in CODE.findall(text))]:
        for node in ast.walk(ast.parse(content, page.name)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ckpt":
                assert hasattr(ckpt, node.attr), (page.name, node.attr)
    for name in re.findall(r"`(?:ckpt\.)?(\w+(?:Error|Warning))\b[^`]*`", text):
        assert hasattr(ckpt, name) or hasattr(builtins, name), (page.name, name)


def test_the_examples_of_public_docstrings_use_only_names_that_they_define() -> None:
    """Their outputs are compared by pytest's own run of docstrings, in the names of the module."""
    modules = (ckpt, ckpt.sharding, ckpt.dcp, ckpt.state_dict, ckpt.events)
    public = [
        (f"{one.__name__}.{name}", getattr(one, name)) for one in modules for name in one.__all__
    ]
    for name, one in public:
        if getattr(one, "__module__", "").startswith("torch."):
            continue
        members = vars(one).items() if inspect.isclass(one) else ()
        for label, each in [(name, one), *((f"{name}.{key}", value) for key, value in members)]:
            if not callable(each) and not isinstance(each, property):
                continue
            examples = doctest.DocTestParser().get_examples(inspect.getdoc(each) or "")
            tree = ast.parse("".join(example.source for example in examples))
            nodes = list(ast.walk(tree))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
            bound |= {(node.asname or node.name).partition(".")[0] for node in nodes
                      if isinstance(node, ast.alias)}  # fmt: skip
            bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            bound |= {node.name for node in nodes
                      if isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
            used = {node.id for node in names}
            assert used - bound - {*dir(builtins)} == set(), label
