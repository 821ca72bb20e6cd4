"""A second output of a save is what `ckpt.convert` makes of its checkpoint, or a warning."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.converting import second_output
from ckpt.stores.store import open_store
from tests.ckpt.late_copies import late_copies
from tests.stores.server import Server

SECONDS = 60.0


def full(name: str, *shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(len(name) + sum(shape))
    return torch.randn(*shape, generator=made)


def sharded_state() -> dict[str, Any]:
    """A model whose tensors 4 ranks hold by rows, by columns, as replicas and on odd meshes."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    turned = DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("c", "d"))
    rows, columns = Shard(0), Shard(1)
    layouts: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (line, [rows]),
        "columns": (line, [columns]),
        "replicas": (line, [Replicate()]),
        "hybrid": (grid, [Replicate(), rows]),
        "both": (grid, [rows, columns]),
        "twice": (grid, [rows, rows]),
        "not_ascending": (turned, [columns, rows]),
    }
    model = {
        name: distribute_tensor(
            full(name, *((12, 8, 3) if mesh is turned else (13, 7, 3))), mesh, placements
        )
        for name, (mesh, placements) in layouts.items()
    }
    model["few"] = distribute_tensor(full("few", 2, 5), line, [rows])
    model["half"] = distribute_tensor(full("half", 9, 4).bfloat16(), line, [columns])
    model["large"] = distribute_tensor(full("large", 300, 500), grid, [rows, Replicate()])
    plain = {"scalar": torch.tensor(3.5), "count": torch.arange(5), "local": full("local", 6, 2)}
    return {"model": {**model, **plain, "tied": model["rows"]}, "step": 3}


HOW: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "dtype": {"*half": None, "*": "bfloat16"}, "max_shard_bytes": 200_000},
    "safetensors": {"to": "safetensors", "rename": {"model.rows": "first"}},
    "one process a file": {"to": "dcp", "part": "model", "dtype": "float16"},
    "torch": {"to": "torch"},
    "npz": {"to": "npz", "dtype": "float32", "select": "model"},
}


def save_with_output(folder: str, how: str, blocking: bool) -> str:
    also = ckpt.SecondOutput(f"{folder}/also", **HOW[how])
    saved = ckpt.save(f"{folder}/step", sharded_state(), also=also, blocking=blocking)
    return "" if saved is None else saved.result(SECONDS).also


def digests(place: Path) -> dict[str, str]:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return {
        file.name if place.is_dir() else "": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "blocking"),
    [
        ("hf", False),
        ("safetensors", True),
        ("one process a file", False),
        *(pytest.param(how, False, marks=pytest.mark.slow) for how in ("torch", "npz")),
    ],
)
def test_ranks_write_from_memory_the_bytes_of_a_conversion(
    clusters: Callable[[int], Any], tmp_path: Path, how: str, blocking: bool
) -> None:
    also = "" if blocking else str(tmp_path / "also")
    assert clusters(4).run(save_with_output, str(tmp_path), how, blocking) == [also] * 4
    ckpt.convert(tmp_path / "step", tmp_path / "converted", **HOW[how])
    assert digests(tmp_path / "also") == digests(tmp_path / "converted")
    assert sorted(os.listdir(tmp_path)) == ["also", "converted", "step"]
    assert not ckpt.verify(tmp_path / "step").problems


def model_folder(folder: Path) -> Path:
    """The files that a model's `save_pretrained` leaves beside its weights."""
    folder.mkdir()
    config = {"model_type": "gpt2", "torch_dtype": "float32", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("blocking", [False, True])
def test_a_folder_for_from_pretrained_has_the_models_names_dtype_and_files(
    tmp_path: Path, blocking: bool
) -> None:
    model, config = torch.nn.Linear(3, 2), model_folder(tmp_path / "base")
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "step": 1}
    also = ckpt.HuggingFace(tmp_path / "hf", config=config, dtype="bfloat16")
    handle = ckpt.save(tmp_path / "step", state, also=also, blocking=blocking)
    if handle is not None:
        handle.wait(SECONDS)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
    }
    assert torch.equal(found["weight"], model.weight.bfloat16())
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "hf/tokenizer.json").exists()
    assert ckpt.read(tmp_path / "step")["step"] == 1  # type: ignore[index, call-overload]


def test_tensors_that_do_not_lie_end_to_end_are_written_as_they_are(tmp_path: Path) -> None:
    base = full("base", 40, 30)
    state = {"turned": base.t(), "strided": base[:, ::2], "conj": torch.randn(4, 2).cfloat().conj()}
    for blocking in (False, True):
        also = ckpt.SecondOutput(tmp_path / f"{blocking}.safetensors")
        handle = ckpt.save(tmp_path / str(blocking), state, also=also, blocking=blocking)
        if handle is not None:
            handle.wait(SECONDS)
        found = load_file(also.place)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_wrong_argument_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    state, place = {"model": {"w": torch.ones(2)}}, tmp_path / "step"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    wrong: dict[str, tuple[type[Exception], dict[str, Any]]] = {
        "names no entry": (ckpt.ArgumentError, {"select": "modle"}),
        "no name": (ckpt.ArgumentError, {"rename": {"v": "w"}}),
        "is not empty": (ckpt.ExistsError, {"place": tmp_path / "taken"}),
        "is the source itself": (ckpt.ExistsError, {"place": place}),
        "no config.json": (ckpt.NotACheckpointError, {"config": tmp_path / "taken"}),
    }
    for message, (kind, arguments) in wrong.items():
        also = ckpt.HuggingFace(arguments.pop("place", tmp_path / "hf"), **arguments)
        for blocking in (False, True):
            with pytest.raises(kind, match=message):
                ckpt.save(place, state, also=also, blocking=blocking)
    assert sorted(os.listdir(tmp_path)) == ["taken"]
    for place_or_dtype in ({"place": "w.onnx"}, {"place": "step"}, {"place": "a", "dtype": "int8"}):
        with pytest.raises(ckpt.ArgumentError):
            ckpt.SecondOutput(**place_or_dtype)


def save_with_a_failure(folder: str) -> tuple[str, bool]:
    """Rank 1 fails to write the output; returns the warning of a rank."""
    state = {"w": distribute_tensor(full("w", 64, 500), init_device_mesh("cpu", (2,)), [Shard(0)])}
    also = ckpt.HuggingFace(f"{folder}/hf")
    with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if dist.get_rank():
            patch.setattr(second_output, "work", None)
        ckpt.save(f"{folder}/step", state, also=also)
    (message,) = [str(one.message) for one in told if one.category is ckpt.SecondOutputWarning]
    return message, os.path.exists(also.place)


def test_a_failure_of_one_rank_is_a_warning_on_all_and_the_checkpoint_stays(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    found = clusters(2).run(save_with_a_failure, str(tmp_path))
    for rank, (message, exists) in enumerate(found):
        start = f"{tmp_path}/step is complete, and its second output {tmp_path}/hf was not written:"
        assert message.startswith(f"{start} {'TypeError' if rank else 'RankError'}")
        assert not exists
    assert "failed on rank 1 with TypeError" in found[0][0]
    assert os.listdir(tmp_path) == ["step"]
    assert not ckpt.verify(tmp_path / "step").problems


def test_a_failure_in_the_background_is_a_warning_that_is_given_once(tmp_path: Path) -> None:
    for name in "ab":
        with late_copies() as go:
            also = ckpt.HuggingFace(tmp_path / f"hf-{name}")
            handle = ckpt.save(tmp_path / name, {"w": torch.ones(9)}, also=also, blocking=False)
            assert handle is not None
            (tmp_path / f"hf-{name}").mkdir()
            (tmp_path / f"hf-{name}/another").touch()
            go.set()
            assert handle.finished(SECONDS)
        if name == "a":
            with pytest.warns(ckpt.SecondOutputWarning, match="hf-a was not written: ExistsError"):
                assert handle.result().also == ""
            handle.wait()
    with pytest.warns(ckpt.SecondOutputWarning, match="hf-b was not .* `ckpt convert` writes it"):
        ckpt.save(tmp_path / "c", {"w": torch.ones(2)})
    assert os.listdir(tmp_path / "hf-b") == ["another"]
    assert all(not ckpt.verify(tmp_path / name).problems for name in "abc")


def save_to_bucket(place: str, options: dict[str, Any]) -> None:
    how = {**HOW["hf"], "storage_options": options}
    handle = ckpt.save(
        f"{place}/step",
        sharded_state(),
        also=ckpt.SecondOutput(f"{place}/also", **how),
        blocking=False,
        storage_options=options,
    )
    assert handle is not None
    handle.wait(SECONDS)


@pytest.mark.thorough
def test_each_rank_writes_whole_files_into_a_bucket(
    clusters: Callable[[int], Any], servers: Callable[[str], Server], tmp_path: Path
) -> None:
    server = servers("moto")
    place = server.url("second")
    clusters(4).run(save_to_bucket, place, server.options)
    ckpt.convert(f"{place}/step", tmp_path / "hf", storage_options=server.options, **HOW["hf"])
    with open_store(f"{place}/also", server.options) as store:
        found = {name: store.read_whole(name, 1 << 30) for name in store.names()}
    assert found == {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()}


def test_a_run_writes_outputs_of_its_steps_and_goes_on_where_a_place_is_taken(
    tmp_path: Path,
) -> None:
    (tmp_path / "hf/step-4").mkdir(parents=True)
    (tmp_path / "hf/step-4/file").touch()
    also = ckpt.HuggingFace(f"{tmp_path}/hf/step-{{step}}")
    how: dict[str, Any] = {"every_steps": 3, "also": also, "also_every": 4}
    with ckpt.Checkpointer(tmp_path / "run", keep=ckpt.Keep(last=1), **how) as run:
        with pytest.warns(ckpt.SecondOutputWarning, match="step-4 is not empty"):
            saved = [n for n in range(1, 10) if run.save(n, {"model": {"w": torch.ones(n)}})]
        assert run.failures == 0
    assert saved == [3, 4, 6, 8, 9]
    assert sorted(os.listdir(tmp_path / "hf")) == ["step-4", "step-8"]
    assert load_file(tmp_path / "hf/step-8/model.safetensors")["w"].shape == (8,)
    for wrong in ({"also": ckpt.HuggingFace("hf")}, {"also_every": 3}, how | {"also_every": 0}):
        with pytest.raises(ckpt.ArgumentError, match="also"):
            ckpt.Checkpointer(tmp_path / "run", **wrong)
