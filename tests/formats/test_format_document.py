"""The worked example of docs/format.md is a checkpoint, byte by byte."""

import re
from pathlib import Path

import torch

import ckpt

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```\w*\n(.*?)\n```", re.DOTALL)


def test_the_worked_example_of_the_format_document_is_a_checkpoint(tmp_path: Path) -> None:
    for name, text in EXAMPLE.findall(DOCUMENT.read_text()):
        if name == "manifest.json":
            data = text.encode()
        else:
            data = b"".join(bytes.fromhex(line[6:53].strip()) for line in text.splitlines())
        (tmp_path / name).write_bytes(data)
    assert len(list(tmp_path.iterdir())) == 3
    state = ckpt.read(tmp_path)
    assert torch.equal(state["model"]["w"], torch.arange(1.0, 7).reshape(3, 2))
    assert state["tied"] is state["model"]["w"]
    assert torch.equal(state["n"], torch.tensor(7))
    assert (state["step"], state["betas"]) == (100, (0.9, 0.999))
