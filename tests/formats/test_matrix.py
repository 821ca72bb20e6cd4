"""Every format of one file or folder to every format, with a model and its optimizer, to the bit.

docs/formats.md has the matrix. Folders of trainers have tests of their own.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckpt
from ckpt.arguments import FormatName
from formats.errors import UnsupportedError
from tests import dcp_alone

TARGETS = get_args(FormatName)
FLAT = ("safetensors", "hf", "npz", "gguf")
"""Targets that hold no plain values of a training."""


@cache
def state() -> dict[str, Any]:
    """A model and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return {"model": dict(model.state_dict()), "optim": optimizer.state_dict(), "epoch": 3}


@cache
def tensors() -> dict[str, torch.Tensor]:
    """The tensors by the names of flat formats."""
    found = {f"model.{name}": tensor for name, tensor in state()["model"].items()}
    for number, entries in state()["optim"]["state"].items():
        found |= {f"optim.state.{number}.{name}": value for name, value in entries.items()}
    return found


def by_dcp(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_alone.save(state(), path)


def by_numpy(path: Path) -> None:
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors().items()})  # type: ignore[arg-type]


def by_safetensors(path: Path) -> None:
    path.mkdir()
    safetensors.torch.save_file(tensors(), path / "model.safetensors")


def by_us(path: Path) -> None:
    """A GGUF file: the library is tested in tests/peers."""
    by_numpy(path.with_suffix(".npz"))
    ckpt.convert(path.with_suffix(".npz"), path)


SOURCES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "ckpt": ("a", lambda path: ckpt.save(path, state())),
    "torch": ("a.pt", lambda path: torch.save(state(), path)),
    "torch-legacy": (
        "a.pt",
        lambda path: torch.save(state(), path, _use_new_zipfile_serialization=False),
    ),
    "pickle": ("a.pkl", lambda path: path.write_bytes(pickle.dumps(state()))),
    "dcp": ("a", by_dcp),
    "safetensors": ("a.safetensors", lambda path: safetensors.torch.save_file(tensors(), path)),
    "huggingface": ("a", by_safetensors),
    "npz": ("a.npz", by_numpy),
    "gguf": ("a.gguf", by_us),
}


def flat(nest: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nest by their names."""
    if isinstance(nest, torch.Tensor):
        return {path: nest}
    items: Any = nest.items() if isinstance(nest, dict) else ()
    if isinstance(nest, list | tuple):
        items = enumerate(nest)
    found: dict[str, torch.Tensor] = {}
    for key, item in items:
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


@pytest.mark.costly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_becomes_every_format_to_the_bit(
    source: str, target: FormatName, tmp_path: Path
) -> None:
    name, write = SOURCES[source]
    write(tmp_path / name)
    assert ckpt.verify(tmp_path / name).format == source
    report = ckpt.convert(tmp_path / name, tmp_path / f"b-{target}", to=target, select="")
    assert report.tensors == len(tensors())
    found = ckpt.read(tmp_path / f"b-{target}")
    read = flat(found)
    assert read.keys() == tensors().keys()
    for key, tensor in tensors().items():
        assert read[key].dtype == tensor.dtype, key
        assert torch.equal(read[key], tensor), key
    nested = source not in ("safetensors", "huggingface", "npz", "gguf")
    if target in FLAT:
        assert ("epoch" in report.left_out) == nested
    elif nested:
        assert isinstance(found, dict)
        assert found["epoch"] == 3
        groups = found["optim"]["param_groups"]
        assert (groups[0] if isinstance(groups, list) else groups["0"])["lr"] == 0.125
    assert ckpt.verify(tmp_path / f"b-{target}").sound
    compared = ckpt.diff(tmp_path / name, tmp_path / f"b-{target}", values=False)
    assert compared.equal
    assert compared.compared_tensors == len(tensors())


@pytest.mark.parametrize(
    ("dtype", "lacking"),
    [(torch.bfloat16, {"npz"}), (torch.float8_e4m3fn, {"npz", "gguf"}), (torch.uint8, {"gguf"})],
    ids=str,
)
def test_a_dtype_that_a_format_lacks_is_refused_by_name(
    dtype: torch.dtype, lacking: set[str], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2).to(dtype), "v": torch.ones(2)}, tmp_path / "a.pt")
    for target in TARGETS:
        there = tmp_path / target
        if target not in lacking:
            ckpt.convert(tmp_path / "a.pt", there, to=target)
            assert flat(ckpt.read(there))["w"].dtype == dtype
            continue
        with pytest.raises(UnsupportedError, match=rf"has no {str(dtype)[6:]}, of .*\bw\b"):
            ckpt.convert(tmp_path / "a.pt", there, to=target)
        assert not there.exists()
        ckpt.convert(tmp_path / "a.pt", there, to=target, exclude="w")


def test_the_document_has_a_row_for_each_format_that_is_written() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert set(re.findall(r"\| `--to (\w+)` \|", text)) >= set(TARGETS)
