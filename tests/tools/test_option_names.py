"""A message of the library names Python's arguments; on the command line it names options."""

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from tools.main import parser
from tools.options import with_options

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"--(?!ckpt-format)[a-z]")  # this one is an option of Megatron


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("pass overwrite=True to replace it", "pass --overwrite to replace it"),
        ("cast it (dtype='float16'), or", "cast it (--dtype float16), or"),
        ("leave it out (exclude='')", "leave it out (--exclude '')"),
        ("name it with select=", "name it with --select"),
        ("max_shard_bytes=, or more", "--max-shard-size, or more"),
        ("parameters={'heads': NUMBER}, or", "--set heads=NUMBER, or"),
        (
            "storage_options={'timeout': 9} changes",
            "--storage-option timeout=9 changes",
        ),
        ("pass strict=False", "pass strict=False"),  # convert has no such option
        ("runs/overwrite=True/step: it", "runs/overwrite=True/step: it"),
        ("kind=full/step-1: it", "kind=full/step-1: it"),
    ],
)
def test_an_argument_is_the_option_of_the_command_if_it_has_one(said: str, meant: str) -> None:
    convert = parser().parse_args(["convert", "a", "b"]).parser
    assert with_options(said, convert) == meant


def test_a_command_without_the_option_leaves_the_argument() -> None:
    assert with_options("pass overwrite=True", parser().parse_args(["ls"]).parser).endswith("=True")


@pytest.mark.thorough
def test_errors_of_the_library_name_no_option() -> None:
    files = [one for name in ("ckpt", "formats", "sharding") for one in (ROOT / name).rglob("*.py")]
    found = []
    for file in files:
        nodes = ast.walk(ast.parse(file.read_text()))
        raised = [node for node in nodes if isinstance(node, ast.Raise)]
        for part in (part for node in raised for part in ast.walk(node)):
            text = str(part.value) if isinstance(part, ast.Constant) else ""
            if OPTION.search(re.sub(r"`ckpt [^`]*", "", text)):  # a whole command to type is fine
                found.append((file.name, text))
    assert found == []


def test_python_reads_its_own_arguments_and_the_command_line_its_own(run, tmp_path: Path) -> None:
    source, there = tmp_path / "w.safetensors", tmp_path / "there.safetensors"
    for path in (source, there):
        save_file({"w": torch.ones(2)}, path)
    with pytest.raises(ckpt.ExistsError, match=r"exists; pass overwrite=True to replace it$"):
        ckpt.convert(source, there)
    ended = run("convert", source, there)
    assert ended.err == f"ckpt: {there} exists; pass --overwrite to replace it\n"
