"""An error at a place without a checkpoint names the checkpoint that is near it."""

import shlex
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpt
from ckpt.opening.sources import COMPARED, DEEPER_LOOKS, LOOKS, checkpoints_below, similar_path
from ckpt.stores.store import open_store


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, and one with a checkpoint of another format."""
    root = tmp_path_factory.mktemp("work")
    for step in (9, 10):
        ckpt.save(root / f"runs/lm/step-{step}", {"w": torch.ones(2)})
    (root / "runz.py").touch()
    (root / "weights.gguf").touch()
    folder = root / "trainer/out/checkpoint-500"
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    return root


@pytest.mark.parametrize(
    ("missing", "meant"),
    [
        ("runs/lmx", "runs/lm"),
        ("runs/lm/step-1O", "runs/lm/step-10"),
        ("runz/lm", "runs/lm"),
        ("runs/lm/stepp-9/", "runs/lm/step-9"),
        ("runz/lm/step-11", "runs"),
        ("runzz.py", None),
        ("weight.gguf", "weights.gguf"),
        ("runs/quite-another", None),
        ("runs/lm", None),
    ],
)
def test_a_missing_path_is_told_with_the_most_similar_one(
    work: Path, monkeypatch: pytest.MonkeyPatch, missing: str, meant: str | None
) -> None:
    monkeypatch.chdir(work)
    assert similar_path(missing) == (f"; did you mean {meant}?" if meant else "")
    there = f"; did you mean {work}/{meant}?" if meant else ""
    assert similar_path(work / missing) == there


def test_a_similar_path_is_sought_only_where_the_search_is_short(tmp_path: Path) -> None:
    assert similar_path("memory://runs/lmx") == ""
    for number in range(COMPARED + 1):
        (tmp_path / f"f{number:04}").mkdir()
    assert similar_path(tmp_path / "f999").startswith("; did you mean ")


@pytest.mark.parametrize(
    ("folder", "only_native", "found"),
    [
        ("runs/lm", False, "runs/lm/step-10"),
        ("runs", True, "runs/lm/step-10"),
        (".", False, None),  # three levels above
        ("trainer/out", False, "trainer/out/checkpoint-500"),
        ("trainer", False, "trainer/out/checkpoint-500"),
        ("trainer", True, None),
        ("runs/lm/step-9", False, None),
    ],
)
def test_checkpoints_are_found_in_a_folder_and_in_the_folders_in_it(
    work: Path, folder: str, only_native: bool, found: str | None
) -> None:
    with open_store(work / folder) as store:
        below = checkpoints_below(store, store.entries(), only_native)
    assert (None if below is None else below.checkpoint) == (found and str(work / found))


def test_a_search_lists_few_folders(work: Path) -> None:
    files = fsspec.filesystem("memory")
    for outer in range(LOOKS + 4):
        for inner in range(DEEPER_LOOKS + 4):
            files.pipe_file(f"/wide/{outer}/{inner}/notes.txt", b"")
    with open_store("memory://wide") as store:
        listed, entries = [], store.entries

        def counted(folder: str = "") -> list[str]:
            listed.append(folder)
            return entries(folder)

        store.entries = counted  # type: ignore[method-assign]
        assert checkpoints_below(store, entries()) is None
    assert len(listed) == LOOKS * (1 + DEEPER_LOOKS)


def test_a_run_in_the_place_of_a_checkpoint_is_told_with_a_checkpoint_of_it(work: Path) -> None:
    run = work / "runs/lm"
    message = rf"give one of these folders, such as {run}/step-10 \(`ckpt latest {run}` prints the"
    with pytest.raises(ckpt.NotACheckpointError, match=message):
        ckpt.load(run, {"w": torch.zeros(2)})
    with pytest.raises(ckpt.NotACheckpointError, match=rf"; {run} is a folder of checkpoints"):
        ckpt.latest(work / "runs")
    with pytest.raises(ckpt.NotACheckpointError, match=r"is here; did you mean .*/step-9"):
        ckpt.delete(work / "runs/lm/step-8")


@pytest.mark.parametrize("name", ["model.pt", "last.ckpt", "weights.npz", "w.npy", "m.gguf"])
def test_a_folder_with_one_file_of_weights_is_opened(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    if name.endswith("npy"):
        np.save(tmp_path / name, np.ones(2))
    elif name.endswith((".npz", ".gguf")):
        ckpt.convert(tmp_path / "a.pt", tmp_path / name)
    else:
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / "a.pt").unlink()
    (tmp_path / "README.md").write_text("weights")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    with ckpt.open(tmp_path) as opened:
        assert opened[next(iter(opened))][...].tolist() == [1.0, 1.0]


def test_a_folder_with_several_files_of_weights_names_the_line_that_opens_one(
    tmp_path: Path,
) -> None:
    for name in ("b.pt", "a b.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ckpt.NotACheckpointError) as error:
        ckpt.open(tmp_path)
    line = str(error.value).rpartition("give one of its 2 files: ")[2]
    command, verb, path = shlex.split(line)
    assert (command, verb) == ("ckpt", "inspect")
    with ckpt.open(path) as opened:
        assert list(opened) == ["w"]


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["flax_model.msgpack", "config.json"], "a msgpack file"),
        (["saved_model.pb"], "a SavedModel"),
        (["openvino_model.bin", "openvino_model.xml"], "an OpenVINO model"),
        (["Manifest.json", "Data/a.mlmodel"], "a Core ML model"),
    ],
)
def test_a_folder_of_another_format_is_named_with_the_remedy(
    tmp_path: Path, files: list[str], kind: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(ckpt.ForeignFileError, match=f"this is {kind}.*; "):
        ckpt.open(tmp_path)


def test_a_cache_of_hugging_face_is_opened_at_the_snapshot_of_main(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for number, revision in enumerate(("abc", "def")):
        snapshot = tmp_path / "snapshots" / revision
        snapshot.mkdir(parents=True)
        save_file({"w": torch.full((2,), number)}, tmp_path / "blobs" / revision)
        (snapshot / "model.safetensors").symlink_to(tmp_path / "blobs" / revision)
    with pytest.raises(ckpt.NotACheckpointError, match=f"{tmp_path}/snapshots/def$"):
        ckpt.open(tmp_path)
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("def")
    with ckpt.open(tmp_path) as opened:
        assert opened["w"][...].tolist() == [1, 1]
    (tmp_path / "refs" / "main").write_text("../../etc")
    with pytest.raises(ckpt.NotACheckpointError, match="names no snapshot"):
        ckpt.open(tmp_path)
