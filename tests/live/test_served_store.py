"""A folder of checkpoints that `ckpt serve` offers is read by its URL, without aiohttp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.stores.object_store import ObjectStore
from ckpt.stores.served_store import ServedStore
from ckpt.stores.store import is_file, join_url, open_store, split_url
from tests.live.test_serve import certificate, serving
from tools.main import main

SERVE = """
import sys
from pathlib import Path
from ckpt.live.serve import ServeOptions, serve
options = ServeOptions(Path(sys.argv[1]), token=sys.argv[2])
serve(options, lambda url: print(url, flush=True))
"""
TOKEN = "a-token?&"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints and a single file."""
    place = tmp_path_factory.mktemp("run")
    for step in (9, 10):
        ckpt.save(place / f"step {step}", {"w": torch.arange(1000.0) + step, "step": step})
    ckpt.convert(place / "step 9", place / "w.safetensors")
    return place


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    """The URL of the folder, with the token."""
    program = [sys.executable, "-c", SERVE, str(run), TOKEN]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_range_of_every_file_is_that_of_the_disk(
    url: str, run: Path, data: st.DataObject
) -> None:
    with open_store(join_url(url, "step 10")) as store, open_store(run / "step 10") as disk:
        assert isinstance(store, ServedStore)
        assert store.sizes() == disk.sizes()
        name = data.draw(st.sampled_from(store.names()))
        lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, disk.size(name))] * 2)))
        assert store.read(name, lo, hi - lo) == disk.read(name, lo, hi - lo)


def test_the_listing_is_that_of_the_disk(url: str, run: Path) -> None:
    with open_store(url) as store, open_store(run) as disk:
        assert store.entries() == disk.entries()
        assert store.entries("step 9") == disk.entries("step 9")
        assert store.folders() == disk.folders()
        assert store.modified("w.safetensors") == pytest.approx(
            disk.modified("w.safetensors"), abs=1
        )
        assert store.entries("other") == []
        assert not store.exists("step 9")
        shard = f"step 9/{open_store(run / 'step 9').names()[0]}"
        with pytest.raises(ckpt.CorruptError, match="truncated"):
            store.read(shard, disk.size(shard) - 1, 2)
        with pytest.raises(ckpt.GoneError):
            store.read("other", 0, 1)
        with pytest.raises(ckpt.SizeError):
            store.read_end(shard, disk.size(shard) + 1, 9)
        with pytest.raises(ckpt.TooLargeError):
            store.read_whole(shard, 10)


def test_every_call_that_reads_a_folder_reads_a_served_one(
    url: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = ckpt.latest(url)
    assert newest == join_url(url, "step 10")
    state = ckpt.load(newest, {"w": torch.zeros(1000), "step": 0})
    assert (float(state["w"][0]), state["step"]) == (10.0, 10)
    assert ckpt.verify(newest).sound
    assert ckpt.diff(newest, run / "step 10").equal
    single = join_url(url, "w.safetensors")
    assert is_file(single)
    assert float(ckpt.read(single)["w"][0]) == 9.0
    ckpt.convert(newest, tmp_path / "w.safetensors")
    for command, place in (("inspect", newest), ("verify", single), ("ls", url), ("latest", url)):
        capsys.readouterr()
        assert main([command, place]) == 0, capsys.readouterr()
        assert capsys.readouterr().out
    with pytest.warns(ckpt.FallbackWarning, match="step 11: no checkpoint here"):
        older = ckpt.load(join_url(url, "step 11"), {"step": 0}, include="step", fallback=[newest])
    assert older["step"] == 10


def test_addresses_are_split_and_joined_around_the_token(url: str) -> None:
    with open_store(url):
        pass
    assert split_url(join_url(url, "step 9")) == (url.replace("/?", "?"), "step 9")


@pytest.mark.parametrize("token", ["?token=wrong", ""])
def test_a_wrong_token_is_denied(url: str, token: str) -> None:
    with pytest.raises(ckpt.AccessDeniedError):
        ckpt.load(url.partition("?")[0] + token, {"step": 0})


def test_a_server_that_has_ended_is_unreachable(run: Path) -> None:
    program = [sys.executable, "-c", SERVE, str(run), TOKEN]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        server.terminate()
    with pytest.raises(ckpt.UnreachableError):
        ckpt.load(url, {"step": 0})


def test_inspect_of_a_served_folder_imports_neither_fsspec_s_driver_nor_torch(url: str) -> None:
    code = (
        "import sys; from tools.main import main; main(sys.argv[1:]); "
        "print([one for one in ('torch', 'aiohttp', 'fsspec') if one in sys.modules])"
    )
    program = [sys.executable, "-c", code, "inspect", join_url(url, "step 9")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_folder_behind_tls_needs_the_certificate(run: Path, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    with serving(run, "--certificate", chain, "--key", key, "--token", TOKEN) as (url, _):
        place, options = join_url(url, "step 9"), {"certificate": str(chain)}
        assert ckpt.load(place, {"step": 0}, include="step", storage_options=options)["step"] == 9
        with pytest.raises(ckpt.UnreachableError, match="certificate"):
            ckpt.load(place, {"step": 0})


def test_another_web_server_belongs_to_the_driver(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        place = f"http://127.0.0.1:{server.server_port}"
        with open_store(place) as store:
            assert isinstance(store, ObjectStore)
        assert split_url(f"{place}/a?token=b") == (place, "a?token=b")
        server.shutdown()
        thread.join()
