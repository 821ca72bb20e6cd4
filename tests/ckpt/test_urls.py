"""Paths and URLs as people write them: each means one place, or is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.stores.store import is_file, open_store
from tests.stores.server import Server, s3_client
from tools.main import main

STATE = {"w": torch.arange(6.0), "step": 3}
SHARD_NAME = "0123456789abcdef-00000.safetensors"
MEANT_OTHERWISE = {
    "": "'' names no folder; the working directory is '.'",
    "file://": "names no folder",
    "~": "~: only a shell expands ~",
    "~/runs/step-1": r"only a shell expands ~, .* Python os.path.expanduser\('~/runs/step-1'\)",
    "s3:/bucket/run": "has lost a slash.*give it as text, s3://bucket/run",
    "memory:/run": "has lost a slash.*give it as text, memory://run",
    "file:/tmp/run": "has lost a slash.*give it as text, file:///tmp/run",
    "memory://bucket/exp::1": ":: stands between URLs and drivers of fsspec, and '1' is neither",
    "simplecach::memory://bucket/exp": "and 'simplecach' is neither",
}
CALLS: dict[str, Callable[[str], Any]] = {
    "save": lambda url: ckpt.save(url, STATE),
    "save in the background": lambda url: ckpt.save(url, STATE, blocking=False).wait(),
    "load": lambda url: ckpt.load(url, dict(STATE)),
    "read": ckpt.read,
    "verify": ckpt.verify,
    "latest": ckpt.latest,
    "delete": ckpt.delete,
    "gc": ckpt.gc,
    "diff": lambda url: ckpt.diff(url, url),
    "convert": lambda url: ckpt.convert(url, "out"),
}


def assert_comes_back(url: str | os.PathLike[str], options: Any = None) -> None:
    """A place is saved to, saved over, read from, and then empty again."""
    ckpt.save(url, STATE, storage_options=options)
    ckpt.save(url, STATE, storage_options=options, overwrite=True)
    found = ckpt.read(url, storage_options=options)
    assert isinstance(found, dict)
    assert torch.equal(found["w"], STATE["w"])
    assert ckpt.verify(url, storage_options=options).sound
    assert ckpt.gc(url, storage_options=options) == []
    ckpt.delete(url, storage_options=options)
    with open_store(url, options) as store:
        assert store.names() == []


@pytest.mark.parametrize("call", CALLS)
def test_what_can_only_be_meant_otherwise_is_refused_and_nothing_is_made(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url, message in MEANT_OTHERWISE.items():
        with pytest.raises(ValueError, match=message):
            CALLS[call](url)
    with pytest.raises(ValueError, match="has lost a slash"):
        CALLS[call](Path("s3://bucket") / "run")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_the_command_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gc", "s3:/bucket/run"]) == 2
    assert "s3://bucket/run" in capsys.readouterr().err
    assert main(["ls", "s4://bucket/run"]) == 5
    assert capsys.readouterr().err.startswith("ckpt: s4://bucket/run: cannot be opened")


@pytest.mark.parametrize(
    "spelled",
    [
        "{}/a b",
        "{}/100%/a%20b#c?d+e&f=g",
        "{}/x/../y",
        "{}//z/",
        "{}/exp::1",
        "{}/exp::s3",
        "{}/::",
        "{}/exp::memory://x",
        "file://{}/a b",
        "file://{}/exp::1",
        "file://{}/a%20b",
    ],
)
def test_a_path_is_taken_as_it_is_written(spelled: str, tmp_path: Path) -> None:
    assert_comes_back(spelled.format(tmp_path))


def test_a_file_url_may_name_this_machine(tmp_path: Path) -> None:
    ckpt.save(f"file://localhost{tmp_path}/run", STATE)
    assert os.path.exists(tmp_path / "run/manifest.json")


def test_a_folder_may_have_a_name_that_looks_like_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./~", "./s3:/run", "12:30/run", "run:/step-1", "~backup", "exp::1", "::"):
        assert_comes_back(name)


def test_a_folder_is_not_deleted_in_the_place_of_one_with_colons(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "exp", STATE)
    with pytest.raises(ckpt.NotACheckpointError, match="exp::1"):
        ckpt.delete(tmp_path / "exp::1")
    ckpt.convert(tmp_path / "exp", tmp_path / "exp::2")
    ckpt.convert(tmp_path / "exp", tmp_path / "m::2.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"exp", "exp::2", "m::2.safetensors"}
    ckpt.delete(tmp_path / "exp::2")
    assert ckpt.verify(tmp_path / "exp").sound


def test_a_chain_of_drivers_is_a_url(tmp_path: Path) -> None:
    with open_store("memory://test_urls_chain") as store:
        store.commit(SHARD_NAME, b"x", replace=False)
        try:
            with open_store("simplecache::memory://test_urls_chain") as chained:
                assert chained.names() == [SHARD_NAME]
        finally:
            store.delete(SHARD_NAME)


def test_the_root_of_a_driver_is_a_folder_to_collect_in() -> None:
    with open_store("memory://test_urls_root") as store:
        store.commit(SHARD_NAME, b"x", replace=False)
        assert "memory://test_urls_root" in {one.folder for one in ckpt.gc("memory://")}
        store.delete(SHARD_NAME)


def test_what_is_borrowed_is_no_left_over_by_whatever_name_it_is_looked_for(tmp_path: Path) -> None:
    frozen = {"frozen": torch.ones(50_000)}
    ckpt.save(tmp_path / "step-1", frozen)
    ckpt.save(tmp_path / "step-2", frozen, base=tmp_path / "step-1")
    os.remove(tmp_path / "step-1/manifest.json")
    (tmp_path / "link").symlink_to(tmp_path / "step-1")
    for url in (f"file://{tmp_path}/link", f"file://{tmp_path}/step-1/.", tmp_path / "link"):
        assert ckpt.gc(url, older_than=0) == []
    assert ckpt.gc(f"file://{tmp_path}/step-1/.", delete=True, older_than=0) == []
    assert os.listdir(tmp_path / "step-1") != []


@pytest.mark.parametrize("folder", ["a b/ünï 日本#c?d=e%20f+g&h/x/../y", "a?versionId=1", "d//e/"])
def test_a_name_in_a_bucket_is_taken_as_it_is_written(folder: str, moto: Server) -> None:
    assert_comes_back(moto.url(f"test_urls/{folder}"), moto.options)


def test_a_whole_bucket_may_be_a_checkpoint(moto: Server) -> None:
    s3_client(moto).create_bucket(Bucket="whole")
    for url in ("s3://whole", "s3://whole/"):
        assert_comes_back(url, moto.options)


def test_a_bucket_of_runs_is_listed_and_watched(
    moto: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    s3_client(moto).create_bucket(Bucket="team")
    ckpt.save("s3://team/run/step-1", STATE, storage_options=moto.options)
    options = [f"{key}={json.dumps(value)}" for key, value in moto.options.items()]
    told = [part for option in options for part in ("-o", option)]
    assert main(["ls", "s3://team", *told]) == 3
    assert "`ckpt latest s3://team/run` prints the newest" in capsys.readouterr().err
    assert main(["top", "s3://team", "--once", "--interval", "0.01", *told]) == 0
    ckpt.save("s3://team/step-7", STATE, storage_options=moto.options)
    assert main(["ls", "s3://team", *told]) == 0
    assert "step-7" in capsys.readouterr().out
    for url in ("s3://team", "s3://team/", "s3://team/none"):
        assert not is_file(url, moto.options)


@pytest.mark.parametrize(
    ("package", "url", "options", "said"),
    [
        ("gcsfs", "gs://b/x", {"token": "anon", "endpont_url": "a"}, "endpoint_url"),
        ("adlfs", "az://b/x", {"account_name": "a", "acount_key": "b"}, "account_key"),
    ],
)
def test_options_that_a_driver_would_ignore_are_wrong_arguments(
    package: str, url: str, options: dict[str, Any], said: str
) -> None:
    pytest.importorskip(package)
    with pytest.raises(ckpt.ArgumentError, match=f"no option of {package}; did you mean '{said}'"):
        ckpt.read(url, storage_options=options)
    known = {key: value for key, value in options.items() if key in ("token", "account_name")}
    open_store(url, {**known, "use_listings_cache": False}).close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": "http://127.0.0.1:1"}, "has 'endpoint', .*; did you mean 'endpoint_url'"),
        ({"zzz": 1}, "has 'zzz', which is no option of s3fs$"),
        ({"endpoint_url": "127.0.0.1:1"}, "endpoint_url '127.0.0.1:1'; give one that"),
        ({"client_kwargs": {"endpoint_url": "localhost:1"}}, "endpoint_url 'localhost:1'; give"),
    ],
)
def test_options_that_s3_does_not_take_are_wrong_arguments(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (ckpt.read, ckpt.gc, ckpt.latest):
        with pytest.raises(ckpt.ArgumentError, match=f"^s3://b/x: storage_options= .*{said}"):
            call("s3://b/x", storage_options=options)
    told = [f"-o{key}={json.dumps(value)}" for key, value in options.items()]
    assert main(["verify", "s3://b/x", *told]) == 2
    assert next(iter(options)).removeprefix("client_kwargs") in capsys.readouterr().err


def test_a_url_without_a_bucket_that_can_be_is_told_apart(moto: Server) -> None:
    for url in ("s3://", "s3:///x", "s3://no bucket!/x", "s3://there-is-none/x"):
        for call in (ckpt.read, ckpt.gc, ckpt.latest):
            with pytest.raises(ckpt.StoreError, match="there is no such bucket") as caught:
                call(url, storage_options=moto.options)
            assert str(caught.value).startswith(url)


def test_a_driver_that_refuses_is_an_error_that_names_the_url(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_STORAGE")]:
        monkeypatch.delenv(name)
    with pytest.raises(ckpt.StoreError, match=r"^s4://b/x: cannot be opened: .*s4; check"):
        ckpt.save("s4://b/x", STATE)
    pytest.importorskip("adlfs")
    with pytest.raises(ckpt.StoreError, match=r"^az://b/x: cannot be opened: .*storage_options="):
        ckpt.save("az://b/x", STATE)


def test_a_save_in_the_background_to_a_bucket_that_is_not_there_fails_in_the_call(
    moto: Server,
) -> None:
    options = moto.options
    with pytest.raises(ckpt.StoreError, match="there is no such bucket"):
        ckpt.save("s3://there-is-none/x", STATE, blocking=False, storage_options=options)


def test_an_error_in_the_background_names_its_place_once(moto: Server) -> None:
    url, options = "s3://there-is-none/x", moto.options
    handle = ckpt.save(url, STATE, blocking=False, overwrite=True, storage_options=options)
    with pytest.raises(ckpt.StoreError, match="there is no such bucket") as caught:
        handle.wait()
    assert str(caught.value).count("s3://there-is-none/x") == 1
