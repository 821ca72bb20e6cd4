"""A folder of checkpoints that `ckpt serve` offers is read by its URL, without aiohttp."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote, urlsplit, urlunsplit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.stores import served_store
from ckpt.stores.addresses import authority
from ckpt.stores.http_client import HttpClient, HttpOptions, Place
from ckpt.stores.object_store import ObjectStore
from ckpt.stores.served_store import ServedStore
from ckpt.stores.store import is_file, join_url, open_store, split_url
from tests.live.test_serve import certificate, serving
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request, nth
from tests.stores.server import Server
from tools.main import main

pytestmark = pytest.mark.thorough

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


@contextmanager
def started(folder: Path) -> Iterator[str]:
    """The URL of a folder, with the token, while a process serves it."""
    program = [sys.executable, "-c", SERVE, str(folder), TOKEN]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    """The URL of the folder, with the token."""
    with started(run) as found:
        yield found


def test_a_bit_that_the_network_flips_is_read_again(url: str) -> None:
    parts = urlsplit(url)
    server = Server("serve", "http", f"http://{parts.netloc}", {}, {})
    with FaultProxy(server) as proxy:
        place = urlunsplit(parts._replace(netloc=urlsplit(proxy.server.endpoint).netloc))
        step = join_url(place, "step 10")
        for number in range(3):  # the manifest, the chunk table with the header, the elements
            proxy.schedule = nth(number, Fault.FLIP_ANSWER, is_a_file)
            with pytest.warns(ckpt.errors.WireWarning) as told:
                found = ckpt.read(step)
            assert torch.equal(found["w"], torch.arange(1000.0) + 10)
            assert TOKEN not in str(told[0].message)
            assert proxy.faults() == {Fault.FLIP_ANSWER}
            proxy.clear()


def is_a_file(request: Request) -> bool:
    return request.method == "GET" and any(
        end in request.target for end in (".json", ".safetensors")
    )


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


@pytest.mark.thorough
def test_every_name_of_a_disk_is_listed_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a%41", "aA", "b?x", "b", "c#x", "c", "d 4", "d%204", "\udcff", "\u00e9"]
    names += ["e\tf", "e\nf\r", "ef"]
    for number, name in enumerate(names):
        ckpt.save(tmp_path / name, {"n": number})
        ckpt.convert(tmp_path / name, tmp_path / f"{name}.pt")
    with started(tmp_path) as url, open_store(url) as store:
        assert store.folders() == sorted(names)
        assert main(["ls", url]) == 0
        assert "\n\\udcff " in capsys.readouterr().out
        start, _, token = url.partition("?")
        for number, name in enumerate(names):
            whole = f"{start}{quote(name, errors='surrogateescape')}"
            for end in ("", ".pt"):
                place = join_url(url, name + end)
                assert split_url(place)[1] == name + end
                assert ckpt.read(place) == {"n": number}
                assert ckpt.read(f"{whole}{end}?{token}") == {"n": number}
        for mark in "?#\t\r\n":
            with pytest.raises(ckpt.ArgumentError, match="write %09, %0A, %3F and %23"):
                ckpt.read(f"{start}b{mark}x?{token}")


@pytest.mark.parametrize("token", ["?token=wrong", ""])
def test_a_wrong_token_is_denied(url: str, token: str) -> None:
    with pytest.raises(ckpt.AccessDeniedError):
        ckpt.load(url.partition("?")[0] + token, {"step": 0})


def test_a_server_that_has_ended_is_unreachable(run: Path) -> None:
    with started(run) as url:
        pass
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


def test_left_overs_are_not_looked_for_where_nothing_can_be_removed(url: str) -> None:
    for delete in (False, True):
        with pytest.raises(ckpt.StoreError, match="only read; write where its files lie"):
            ckpt.gc(url, delete=delete)


@contextmanager
def told(*answers: bytes) -> Iterator[str]:
    """The URL of a server of ours that gives these answers, one on each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connected, _ = listener.accept()
                with connected:
                    connected.recv(1 << 16)
                    connected.sendall(b"HTTP/1.1 " + answer)

        server = Thread(target=serve, daemon=True)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/run"
        server.join(60)


OURS = b"200 OK\r\nServer: ckpt/0\r\nContent-Length: 0\r\n\r\n"


def test_an_answer_that_ends_too_early_is_an_error_and_no_shorter_file() -> None:
    half = b"200 OK\r\nContent-Length: 9\r\n\r\n{..."
    said = pytest.raises(ckpt.UnreachableError, match="4 bytes read, 5 more expected")
    with told(OURS, half) as url, open_store(url) as store, said:
        store.read_whole("config.json", 100)


def test_a_file_of_unknown_size_is_compared_with_the_limit() -> None:
    with told(OURS, *[b"200 OK\r\n\r\n12345"] * 2) as url, open_store(url) as store:
        assert store.read_whole("config.json", 5) == b"12345"
        with pytest.raises(ckpt.TooLargeError):
            store.read_whole("config.json", 4)


def test_a_range_that_is_shorter_than_wanted_is_an_error() -> None:
    short = b"206 OK\r\nContent-Range: bytes 2-4/100\r\nContent-Length: 3\r\n\r\nabc"
    with told(OURS, short, short) as url, open_store(url) as store:
        with pytest.raises(ckpt.ProtocolError, match=r"bytes 2:8 were asked"):
            store.read("f", 2, 6)
        with pytest.raises(ckpt.ProtocolError, match=r"bytes 2:100 were asked"):
            store.read_end("f", 100, 98)


@pytest.mark.parametrize(
    "listing",
    [
        b'{"files": {"a": [1]}, "folders": []}',
        b'{"files": {"a": "1"}, "folders": []}',
        b'{"files": {"a": -1}, "folders": []}',
        b'{"files": {}, "folders": [1]}',
    ],
)
def test_a_listing_with_other_types_is_a_named_error(listing: bytes) -> None:
    answer = b"200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(listing), listing)
    said = pytest.raises(ckpt.StoreError, match="no listing of a folder")
    with told(OURS, answer) as url, open_store(url) as store, said:
        store.entries()


def test_a_size_that_the_server_does_not_tell_is_an_error() -> None:
    said = pytest.raises(ckpt.StoreError, match="does not tell the size")
    with told(OURS, b"200 OK\r\n\r\n") as url, open_store(url) as store, said:
        store.size("f")


def test_a_password_in_the_url_of_a_server_is_in_no_message() -> None:
    missing = b"404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with told(OURS, missing) as url, open_store(url.replace("//", "//me:sesame@")) as store:
        assert "sesame" not in str(store)
        with pytest.raises(FileNotFoundError) as raised:
            store.size("f")
    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["http:///run", "https://[bad]/run", "http://[::1/run", "http://h:x/run"]
)
def test_a_url_of_no_server_is_an_argument_error_at_once(url: str) -> None:
    with pytest.raises(ckpt.ArgumentError):
        ckpt.latest(url)
    assert split_url(url)[1] == "run"


def test_a_folder_is_served_at_an_address_of_ipv6(run: Path) -> None:
    with serving(run, "--address", "::1", "--token", TOKEN) as (url, _):
        assert url.startswith("http://[::1]:")
        assert ckpt.read(join_url(url, "step 9"))["step"] == 9  # type: ignore[index]
        assert len(ckpt.run_steps(url)) == 0


def test_another_web_server_at_an_address_of_ipv6_belongs_to_the_driver(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    ckpt.save(tmp_path, {"step": 9})
    with quiet_server(tmp_path, "::1") as place:
        assert ckpt.read(place)["step"] == 9  # type: ignore[index]


@contextmanager
def quiet_server(folder: Path, address: str) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    with Server((address, 0), Quiet) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{authority(address, server.server_port)}"
        server.shutdown()
        thread.join()


def test_another_web_server_belongs_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(served_store, "_ours", {})  # an earlier server may have had this port
    with quiet_server(tmp_path, "127.0.0.1") as place:
        with open_store(place) as store:
            assert isinstance(store, ObjectStore)
        assert split_url(f"{place}/a?token=b") == (place, "a?token=b")


def test_no_text_for_people_and_no_page_has_the_token(
    url: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page, differences = (
        join_url(url, "w.safetensors"),
        tmp_path / "a.html",
        tmp_path / "b.html",
    )
    for command in (
        ["inspect", file],
        ["verify", file],
        ["plan", file, "--world-size", "2"],
        ["convert", file, str(tmp_path / "new")],
        ["top", url, "--once", "--interval", "0"],
        ["inspect", file, "--html", str(page)],
        ["diff", file, str(run / "step 10"), "--html", str(differences)],
    ):
        assert main(command) in (0, 1)
        found = capsys.readouterr()
        assert found.out
        assert "a-token" not in found.out + found.err
    assert "a-token" not in page.read_text() + differences.read_text()


class TellsItsClient(BaseHTTPRequestHandler):
    """Answers each request by the port of the client, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = str(self.client_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_forked_child_does_not_use_the_connection_of_its_parent() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), TellsItsClient) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        client = HttpClient(Place("127.0.0.1", server.server_port), HttpOptions())
        ours = client.ask("GET", "/").body
        theirs, end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(end, client.ask("GET", "/").body)
            finally:
                os._exit(0)
        os.close(end)
        os.waitpid(child, 0)
        assert int(os.read(theirs, 10)) != int(ours)
        assert client.ask("GET", "/").body == ours
        client.close()
        os.close(theirs)
        server.shutdown()
        thread.join()
