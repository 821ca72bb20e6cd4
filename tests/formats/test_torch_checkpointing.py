"""A folder that torch_checkpointing 0.1 wrote on two ranks (tests/data/torch_checkpointing)."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, FormatError, UnsupportedError
from tests.data.torch_checkpointing.make import SHAPES, value

DATA = Path(__file__).parent.parent / "data" / "torch_checkpointing" / "step-5"


def tensor(name: str, prefix: str = "") -> torch.Tensor:
    return torch.tensor(value(name, prefix)).view(SHAPES[name])


def test_tensors_are_put_together_and_values_are_those_that_were_saved() -> None:
    found = ckpt.read(DATA)
    assert list(found["model"]) == list(SHAPES)
    for name in SHAPES:
        assert torch.equal(found["model"][name], tensor(name))
        assert torch.equal(found["optimizer"]["state"][name]["exp_avg"], tensor(name, "exp_avg"))
    assert found["optimizer"]["param_groups"] == [{"lr": 0.01, "params": list(SHAPES)}]
    assert found["step"] == 5
    assert found["rank"] == {"rank 0": {"of": 0}, "rank 1": {"of": 1}}


def test_a_slice_is_read_of_the_parts_that_have_it() -> None:
    with ckpt.open(DATA) as found:
        part = found["model.out.weight"][1:, 1:3]
    assert torch.equal(part, tensor("out.weight")[1:, 1:3])


def test_verify_checks_every_file() -> None:
    report = ckpt.verify(DATA)
    assert report.sound
    assert report.files == 9


def copied(folder: Path) -> Path:
    shutil.copytree(DATA, folder / "step")
    return folder / "step"


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "model_1.pt").unlink()
    with pytest.raises(CorruptError, match="the file of rank 1 is missing, which has a part of"):
        ckpt.read(folder)


def described(folder: Path) -> Any:
    return pickle.loads((folder / "metadata.pkl").read_bytes())


def test_files_of_another_division_are_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    told = described(folder)
    [group] = told["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]']
    group["sharding_metadata"]["data"]["global_shape"] = [7, 4]
    (folder / "metadata.pkl").write_bytes(pickle.dumps(told))
    with pytest.raises(FormatError, match=r"the shape \(3, 4\), by metadata.pkl it has \(4, 4\)"):
        ckpt.read(folder)


def test_placements_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    told = described(folder)
    [group] = told["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]']
    strided = {"type": "StridedShard", "dim": 0, "split_factor": 2}
    group["sharding_metadata"]["data"]["placements"] = [strided]
    (folder / "metadata.pkl").write_bytes(pickle.dumps(told))
    with pytest.raises(UnsupportedError, match="the placement 'StridedShard'"):
        ckpt.read(folder)


def test_a_layout_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    told = described(folder)
    told["metadata"]["model"]["rank_to_layout_info"][0] = {"file_path": "../x", "type": "Raw"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(told))
    with pytest.raises(UnsupportedError, match="'model' has a layout of its own"):
        ckpt.read(folder)


def a_folder(folder: Path, files: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A folder whose item `model` has tensors of two rows by key path, cut over these ranks."""
    for name, content in files.items():
        torch.save(content, folder / name)
    cut = {"type": "Shard", "dim": 0}
    told = {
        path: [
            {
                "sharding_metadata": {
                    "data": {
                        "global_shape": [2],
                        "mesh_spec": {"mesh_shape": [len(ranks)], "mesh_data": list(ranks)},
                        "placements": [cut],
                    }
                }
            }
        ]
        for path, ranks in tensors.items()
    }
    model = {"rank_to_layout_info": {}, "nested_path_to_metadata": told}
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {"model": model}}))
    return folder


def test_entries_of_all_ranks_are_read(tmp_path: Path) -> None:
    """The stages of a pipeline have different ones."""
    first = {"all": torch.zeros(1), "a": torch.zeros(2), "n": [1], "same": 3}
    second = {"all": torch.ones(1), "b": torch.ones(2), "n": [1, {"x": 2}], "same": 4}
    tensors = {'["all"]': (0, 1), '["a"]': (0,), '["b"]': (1,)}
    folder = a_folder(tmp_path, {"model_0.pt": first, "model_1.pt": second}, tensors)
    found = ckpt.read(folder)["model"]
    assert {name: found[name].tolist() for name in ("all", "a", "b")} == {
        "all": [0, 1],
        "a": [0, 0],
        "b": [1, 1],
    }
    assert (found["n"], found["same"]) == ([1, {"x": 2}], 3)


def test_a_tensor_below_a_value_of_another_rank_is_refused(tmp_path: Path) -> None:
    files = {"model_0.pt": {"a": 1}, "model_1.pt": {"a": {"b": torch.ones(2)}}}
    with pytest.raises(FormatError, match=r"model\['a'\]\['b'\] lies below a value"):
        ckpt.read(a_folder(tmp_path, files, {'["a", "b"]': (1,)}))


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    files = {f"model_{rank}.pt": {"a": torch.ones(2)} for rank in ("0", "00")}
    with pytest.raises(FormatError, match=r"model_0\.pt and model_00\.pt are both of rank 0"):
        ckpt.read(a_folder(tmp_path, files, {'["a"]': (0,)}))
