"""A folder of Megatron-core, as Megatron-core 0.16 wrote it on two ranks (tests/data/megatron)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import FormatError, UnsupportedError
from ckpt.opening.sources import open_source
from tests.data.megatron.make import FOLDER, SHAPES, STATES, value

DATA = Path(__file__).parent.parent / "data" / "megatron"


@pytest.mark.parametrize("place", [DATA, DATA / FOLDER])
def test_tensors_objects_and_common_values_are_those_that_were_saved(place: Path) -> None:
    found = ckpt.read(place)
    for prefix in STATES:
        for name, shape in SHAPES.items():
            expected = torch.tensor(value(name, prefix)).view(shape)
            assert torch.equal(found[prefix + name], expected)
    for rank in (0, 1):
        assert found[f"decoder.layers._extra_state/shard_{rank}_2"] == [
            {"recipe": f"of rank {rank}"}
        ]
        [[state]] = found[f"rng_state/shard_{rank}_2"]
        assert state.tolist() == [rank, 1 + rank, 2 + rank]
    assert (found["iteration"], found["checkpoint_version"]) == (5, 3.0)
    assert found["optimizer"] == {"param_groups": [{"lr": 0.01, "betas": (0.9, 0.95), "step": 5}]}
    assert found["mean"].tolist() == [0.0, 1.0]


def test_arguments_are_shown_and_not_made() -> None:
    with open_source(DATA) as source:
        assert isinstance(source.catalog.tree, dict)
        assert "argparse.Namespace" in str(source.catalog.tree["args"])


def test_a_conversion_keeps_the_tensors(tmp_path: Path) -> None:
    ckpt.convert(DATA, tmp_path / "a.safetensors", include=["decoder.*", "embedding.*"])
    found = ckpt.read(tmp_path / "a.safetensors")
    for name, shape in SHAPES.items():
        assert torch.equal(found[name], torch.tensor(value(name)).view(shape))


def test_verify_finds_it_sound() -> None:
    assert ckpt.verify(DATA / FOLDER).sound


def copied(folder: Path) -> Path:
    shutil.copytree(DATA, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def test_another_format_of_megatron_is_refused_by_name(tmp_path: Path) -> None:
    folder = copied(tmp_path / "run")
    told = {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (folder / FOLDER / "metadata.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedError, match=r"format 'zarr'.*--ckpt-format torch_dist"):
        ckpt.read(folder)


@pytest.mark.parametrize("backend", ["torch_dist", "fsdp_dtensor"])
def test_both_formats_of_folders_of_dcp_are_read(backend: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / "run")
    told = {"sharded_backend": backend, "sharded_backend_version": 1}
    (folder / FOLDER / "metadata.json").write_text(json.dumps(told))
    assert ckpt.diff(DATA, folder).equal


def test_missing_common_values_are_told(tmp_path: Path) -> None:
    folder = copied(tmp_path / "run")
    assert ckpt.verify(folder / FOLDER).notes == ()
    (folder / FOLDER / "common.pt").unlink()
    assert ckpt.verify(folder / FOLDER).notes == (
        "common.pt is missing, with the arguments and the options of the optimizer",
    )


def test_the_newest_iteration_must_be_there(tmp_path: Path) -> None:
    folder = copied(tmp_path / "run")
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    with pytest.raises(UnsupportedError, match="says '6'"):
        ckpt.read(folder)


def test_a_value_in_both_files_is_an_error(tmp_path: Path) -> None:
    folder = copied(tmp_path / "run")
    torch.save({"rng_state/shard_0_2": 1}, folder / FOLDER / "common.pt")
    with pytest.raises(FormatError, match="rng_state/shard_0_2 is in another file"):
        ckpt.read(folder)
