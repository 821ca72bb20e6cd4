"""A load goes back to the newest sound checkpoint, on all ranks, and says so."""

import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.loading.load import DAMAGE, Loaded, load_or_older, load_partly
from ckpt.opening.sources import TRIES
from formats.errors import FormatError, UnsupportedError
from sharding.agreement.ranks import Ranks
from tests.conftest import RankDied
from tests.selection import examples
from tests.stores.server import Server, s3_client

ROWS = 40_000
"""Of 8 bytes: five chunks."""


def state(value: float) -> dict[str, Any]:
    return {
        "a": torch.full((ROWS, 2), float(value)),
        "b": torch.full((ROWS, 2), float(value)),
        "step": int(value),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints: steps 1, 2 and 3."""
    for step in (1, 2, 3):
        ckpt.save(tmp_path / f"step-{step}", state(step))
    return tmp_path


def flip_last(folder: Path, name: str = "b") -> None:
    """Damage the last chunk of a tensor that a rank stores, so that others have been read."""
    with ckpt.open(folder) as checkpoint:
        extent = list(checkpoint[name].record.pieces)[-1].extent
    path = folder / extent.file
    data = bytearray(path.read_bytes())
    data[extent.offset + extent.nbytes - 1] ^= 1
    path.write_bytes(data)


def break_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def remove_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def cut_file(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size // 2)


def lengthen_file(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size + 1)


DAMAGES = (
    *(flip_last, break_manifest, cut_file, lengthen_file),
    *(remove_manifest, remove_file, shutil.rmtree),
)


def kinds_of(error: type[Exception]) -> set[type[Exception]]:
    return {error}.union(*map(kinds_of, error.__subclasses__()))


def test_every_error_that_bytes_can_cause_is_damage_but_a_later_version() -> None:
    wrapped = {"PastEndError", "ShortAnswerError"}  # what a store makes a CorruptError of
    sound = kinds_of(UnsupportedError)  # of a later version, or of a library that is not read
    found = kinds_of(FormatError) - sound
    said = {error.__name__ for error in found if error.__module__[:5] != "tests"}
    assert said - wrapped <= set(DAMAGE)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run: Path, damage: Callable) -> None:
    damage(run / "step-3")
    target = state(0)
    with pytest.warns(ckpt.FallbackWarning) as warned:
        assert ckpt.load(run / "step-3", target, fallback=True) is target
    assert (target["a"] == 2).all()
    assert (target["b"] == 2).all()
    assert target["step"] == 2
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert warning.taken == str(run / "step-2")
    kind = "not_a_checkpoint" if damage in (remove_manifest, shutil.rmtree) else "corrupt"
    assert [(one.url, one.kind) for one in warning.skipped] == [(str(run / "step-3"), kind)]
    assert "mix of old and new" not in str(warning), "the target is whole"
    assert warned[0].filename == __file__


def test_a_sound_checkpoint_is_loaded_without_a_word(run: Path) -> None:
    assert ckpt.load(run / "step-2", state(0), fallback=True)["step"] == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_fallback_damage_is_an_error_that_names_it(run: Path, damage: Callable) -> None:
    damage(run / "step-3")
    is_there = damage not in (remove_manifest, shutil.rmtree)
    kind = ckpt.CorruptError if is_there else ckpt.NotACheckpointError
    with pytest.raises(kind) as error:
        ckpt.load(run / "step-3", state(0))
    assert ("; fallback=True would load the newest sound" in str(error.value)) is is_there
    advises_to_exclude = "exclude= with the names of damaged tensors" in str(error.value)
    assert advises_to_exclude is isinstance(error.value, ckpt.DamagedLoadError)
    if advises_to_exclude:
        damaged = [problem.tensor for problem in ckpt.verify(run / "step-3").problems]
        sound = ckpt.load(run / "step-3", state(0), exclude=[name for name in damaged if name])
        assert sound["step"] == 3
    with pytest.raises(kind) as error:
        load_partly(
            *(run / "step-3", state(0)),
            allows_missing=False,
            verify=True,
            group=None,
            storage_options=None,
        )
    assert "; fallback=" not in str(error.value), "its users have no such argument"


def test_it_goes_back_as_far_as_it_must_and_never_forward(run: Path) -> None:
    ckpt.save(run / "step-4", state(4))
    for step in (2, 3):
        break_manifest(run / f"step-{step}")
    with pytest.warns(ckpt.FallbackWarning) as warned:
        assert ckpt.load(run / "step-3", state(0), fallback=True)["step"] == 1
    (warning,) = (entry.message for entry in warned)
    assert isinstance(warning, ckpt.FallbackWarning)
    assert [one.url for one in warning.skipped] == [str(run / "step-3"), str(run / "step-2")]


def test_the_fallbacks_may_be_named(run: Path, tmp_path: Path) -> None:
    flip_last(run / "step-3")
    others = [tmp_path / "nowhere", str(run / "step-1")]
    with pytest.warns(ckpt.FallbackWarning, match="step-1 is used"):
        assert ckpt.load(run / "step-3", state(0), fallback=others)["step"] == 1
    with pytest.warns(ckpt.FallbackWarning, match="step-2 is used"):
        assert ckpt.load(run / "step-3", state(0), fallback=run / "step-2")["step"] == 2


def test_a_target_that_does_not_fit_does_not_fall_back(run: Path) -> None:
    with pytest.raises(ckpt.MismatchError, match="step-3"):
        ckpt.load(run / "step-3", {"other": torch.zeros(3)}, fallback=True)


def test_where_no_fallback_is_sound_the_error_has_all_of_them(run: Path) -> None:
    for step, damage in ((1, flip_last), (2, remove_file), (3, break_manifest)):
        damage(run / f"step-{step}")
    with pytest.raises(ckpt.DamagedLoadError) as error:
        ckpt.load(run / "step-3", state(0), fallback=True)
    assert set(error.value.touched) == {"a", "b"}
    for step in (1, 2, 3):
        assert f"step-{step}/" in str(error.value)


def test_where_there_is_no_older_one_the_error_is_what_it_would_be(run: Path) -> None:
    break_manifest(run / "step-1")
    none = "; fallback=True found no older checkpoint beside it"
    with pytest.raises(ckpt.CorruptError, match=f"step-1/manifest.*{none}"):
        ckpt.load(run / "step-1", state(0), fallback=True)
    with pytest.raises(ckpt.NotACheckpointError, match=f"nowhere.*{none}"):
        ckpt.load(run / "nowhere" / "step-1", state(0), fallback=True)


def test_what_a_damaged_one_filled_and_its_fallback_has_not_is_an_error(run: Path) -> None:
    flip_last(run / "step-3")
    ckpt.save(run / "less", {"a": torch.ones(ROWS, 2), "step": 0})
    with (
        pytest.warns(UserWarning, match="strict=False skips 1: b") as warned,
        pytest.raises(
            ckpt.PartialLoadError, match=r"step-3 is damaged .*less, loaded in its place"
        ) as error,
    ):
        ckpt.load(run / "step-3", state(0), fallback=run / "less", strict=False)
    assert error.value.touched == ("b",)
    assert warned[0].filename == __file__
    with pytest.raises(
        ckpt.PartialLoadError, match=r"then .*less failed with MismatchError"
    ) as error:
        ckpt.load(run / "step-3", state(0), fallback=run / "less")
    assert set(error.value.touched) == {"a", "b"}


def sharded(value: float) -> dict[str, Any]:
    """`a` cut over the ranks, `b` the same on all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    whole = state(value)
    cut = distribute_tensor(whole["a"], mesh, [Shard(0)], src_data_rank=None)
    return {**whole, "a": cut}


def save_run(folder: str) -> None:
    for step in (1, 2, 3):
        ckpt.save(f"{folder}/step-{step}", sharded(step))


def load_on_ranks(folder: str, replicas: str) -> tuple[set[float], int, list[Sequence[str]]]:
    """The numbers in what was loaded, and what was warned of."""
    target = sharded(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ckpt.load(f"{folder}/step-3", target, fallback=True, replicas=replicas)
    found = set(target["a"].to_local().unique().tolist()) | set(target["b"].unique().tolist())
    said = [entry.message for entry in warned]
    skipped = [
        [one.url.rpartition("/")[2] for one in message.skipped]
        for message in said
        if isinstance(message, ckpt.FallbackWarning)
    ]
    return found, target["step"], skipped


@pytest.mark.parametrize("replicas", ["read", "exchange"])
@pytest.mark.parametrize("damage", [flip_last, break_manifest, remove_file])
def test_all_ranks_go_back_to_the_same_checkpoint_whichever_met_the_damage(
    clusters: Callable, tmp_path: Path, damage: Callable, replicas: str
) -> None:
    clusters(2).run(save_run, str(tmp_path))
    if damage is flip_last:
        flip_last(tmp_path / "step-3", "a")  # only rank 1 needs those bytes
    else:
        damage(tmp_path / "step-3")
    remove_manifest(tmp_path / "step-2")
    first, second = clusters(2).run(load_on_ranks, str(tmp_path), replicas)
    assert first == ({1.0}, 1, [["step-3"]])
    assert second == ({1.0}, 1, []), "one rank tells"


def load_with_warnings_as_errors(folder: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            ckpt.load(f"{folder}/step-3", sharded(0), fallback=True)
        except (ckpt.FallbackWarning, ckpt.RankError) as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_warning_that_is_an_error_ends_the_load_on_all_ranks(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_run, str(tmp_path))
    break_manifest(tmp_path / "step-3")
    first, second = clusters(2).run(load_with_warnings_as_errors, str(tmp_path))
    assert first.startswith("FallbackWarning: ")
    assert second.startswith("RankError: ")
    assert "rank 0" in second
    assert "step-2 is used" in second


def touched_on_ranks(folder: str) -> tuple[str, tuple[str, ...], set[float]]:
    target = sharded(0)
    said = "; fallback=True would load .* may hold a mix"
    with pytest.raises((ckpt.RankError, ckpt.DamagedLoadError), match=said) as error:
        ckpt.load(f"{folder}/step-3", target)
    found = set(target["b"].unique().tolist())
    return type(error.value).__name__, error.value.touched, found


def test_a_rank_that_read_all_says_too_what_it_has_touched(
    clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_run, str(tmp_path))
    flip_last(tmp_path / "step-3", "a")
    first, second = clusters(2).run(touched_on_ranks, str(tmp_path))
    assert first == ("RankError", ("a", "b"), {3.0})
    assert second[:2] == ("DamagedLoadError", ("a", "b"))


def load_and_die(folder: str) -> None:
    def progress(nbytes: int) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt.load(f"{folder}/step-3", sharded(0), fallback=True, progress=progress)


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_and_no_reason_to_go_back(
    doomed_cluster: Callable, clusters: Callable, tmp_path: Path
) -> None:
    clusters(2).run(save_run, str(tmp_path))
    with pytest.raises(RankDied) as died:
        doomed_cluster(2).run(load_and_die, str(tmp_path))
    assert died.value.dead == [1]
    name, message, _ = died.value.errors[0]
    assert name == "RankError"
    assert "rank 1" in message
    assert "step-2" not in message


STATES = st.sampled_from([None, None, *DAMAGES])
"""Of a checkpoint: sound, or what befell it."""


@settings(derandomize=True, deadline=None, max_examples=examples(25))
@given(befell=st.lists(STATES, min_size=5, max_size=5), asked=st.integers(1, 5))
def test_what_is_loaded_is_the_newest_sound_one_up_to_what_was_asked_for(
    tmp_path_factory: pytest.TempPathFactory, befell: list[Callable | None], asked: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    for step, damage in enumerate(befell, 1):
        ckpt.save(run / f"step-{step}", {"b": torch.full((90,), float(step)), "step": step})
        if damage is not None:
            damage(run / f"step-{step}")
    sound = [step for step in range(1, 6) if befell[step - 1] is None]
    target = {"b": torch.zeros(90), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckpt.FallbackWarning)
        if any(step <= asked for step in sound):
            ckpt.load(run / f"step-{asked}", target, fallback=True)
            assert target["step"] == max(step for step in sound if step <= asked)
            assert (target["b"] == target["step"]).all()
        else:
            with pytest.raises((ckpt.CorruptError, ckpt.NotACheckpointError)):
                ckpt.load(run / f"step-{asked}", target, fallback=True)
        if sound:
            assert ckpt.latest(run, verify=True) == str(run / f"step-{max(sound)}")
        else:
            with pytest.raises((ckpt.CorruptError, ckpt.NotACheckpointError)):
                ckpt.latest(run, verify=True)


@pytest.mark.thorough
def test_in_a_bucket_it_goes_back_as_on_a_disk(moto: Server) -> None:
    run, told = moto.url("fallback"), dict(moto.options)
    for step in (1, 2, 10):
        ckpt.save(f"{run}/step-{step}", state(step), storage_options=told)
    assert ckpt.latest(run, storage_options=told) == f"{run}/step-10"
    client = s3_client(moto)
    listed = client.list_objects_v2(Bucket=moto.bucket, Prefix="fallback/")["Contents"]
    for key in (entry["Key"] for entry in listed):
        if re.search(r"step-10/.*safetensors|step-2/manifest", key):
            client.delete_object(Bucket=moto.bucket, Key=key)
    with pytest.warns(ckpt.FallbackWarning, match="step-1 is used"):
        assert ckpt.latest(run, storage_options=told) == f"{run}/step-1"
    with pytest.warns(ckpt.FallbackWarning, match="step-1 is used"):
        loaded = ckpt.load(f"{run}/step-10", state(0), fallback=True, storage_options=told)
    assert loaded["step"] == 1


def test_a_checkpoint_that_was_deleted_while_it_was_read_is_gone_and_not_damaged() -> None:
    ranks = Ranks()
    failures: list[Exception] = [
        ckpt.NotACheckpointError("no checkpoint is here"),
        ckpt.ReplacedLoadError("it was deleted while it was read", ["w"]),
    ]

    def load(url: str) -> Loaded:
        def failing() -> Loaded:
            raise failures.pop()

        return ranks.run_on_all("loading", failing)

    with pytest.raises(ckpt.ReplacedLoadError, match="no checkpoint is here") as error:
        load_or_older(ranks, "run/step-1", False, load, None)
    assert error.value.touched == ("w",)


def test_a_checkpoint_that_is_replaced_in_each_try_is_replaced_after_reads_too() -> None:
    ranks = Ranks()
    gone = ckpt.VersionGoneError("run", 12, 13)
    failures: list[Exception] = [gone] * (TRIES - 1)
    failures.append(ckpt.ReplacedLoadError("version 3 was replaced", ["w"]))

    def load(url: str) -> Loaded:
        def failing() -> Loaded:
            raise failures.pop()

        return ranks.run_on_all("loading", failing)

    with pytest.raises(ckpt.ReplacedLoadError, match="version 12 was replaced") as error:
        load_or_older(ranks, "run/step-1", False, load, None)
    assert error.value.touched == ("w",)
    assert not failures
