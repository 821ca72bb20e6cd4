"""`ckpt serve`: checkpoints of a folder over HTTP, and nothing else."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.checking.doctor import examine
from ckpt.checking.report import Outcome
from ckpt.live.http_server import HttpConnection, HttpRequest
from ckpt.live.protocol import RefusedError
from ckpt.live.serve import FolderApp, ServeOptions, _parts
from sharding.errors import ArgumentError
from tests.live.hosts import TOKEN, Client, descriptors_of, until
from tools.exit_codes import ExitCode
from tools.main import main

PROGRAM = "import sys; from tools.main import main; sys.exit(main(sys.argv[1:]))"


def client_of(url: str, token: str | None = TOKEN) -> Client:
    parts = urlsplit(url)
    return Client((str(parts.hostname), int(parts.port or 0)), token)


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`ckpt serve` in a process; its URL. It ends by a signal, with exit code 0."""
    command = [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, **pipes, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that it should and should not serve."""
    found = tmp_path_factory.mktemp("serve") / "run"
    (found / "step-1" / "deep").mkdir(parents=True)
    (found / "step-1" / "data").write_bytes(bytes(range(256)) * 100)
    (found / "step-1" / "deep" / "x y%2f?#.bin").write_bytes(b"odd")
    (found / "empty").write_bytes(b"")
    secret = found.parent / "secret"
    secret.mkdir()
    (secret / "key").write_text("SECRET")
    (found.parent / "run-too").mkdir()
    (found.parent / "run-too" / "key").write_text("SECRET")
    (found / "inside").symlink_to("step-1/data")
    (found / "out").symlink_to(secret / "key")
    (found / "out-folder").symlink_to("../secret")
    (found / "loop").symlink_to("loop")
    (found / "dangling").symlink_to("nowhere")
    os.mkfifo(found / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(found)
        bound.bind("socket")
        os.chdir(here)
    return found


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with serving(folder, CKPT_TOKEN=TOKEN) as (url, _), client_of(url) as found:
        yield found


def test_the_doctor_only_reads_from_a_server_of_checkpoints(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_TOKEN", TOKEN)
    examination = examine(f"http://{client.connection.host}:{client.connection.port}")
    found = {one.name: one.outcome for one in examination.findings}
    assert (found["list"], found["range read"]) == (Outcome.OK, Outcome.OK)
    assert found["put"] is Outcome.NOT_TRIED
    assert examination.folder == ""


def test_files_and_ranges_of_them_are_served(client: Client, folder: Path) -> None:
    data = (folder / "step-1" / "data").read_bytes()
    whole = client.get("/step-1/data")
    assert (whole.status, whole.body) == (200, data)
    part = client.get("/step-1/data", Range="bytes=1000-1999")
    assert (part.status, part.body) == (206, data[1000:2000])
    assert client.ask("HEAD", "/step-1/data").headers["content-length"] == str(len(data))
    assert client.get("/inside").body == data
    assert client.get("/empty").body == b""
    assert client.get(f"/step-1/deep/{quote('x y%2f?#.bin', safe='')}").body == b"odd"
    assert client.get("/step-1/data", Range="bytes=99999-").status == 416


def test_a_listing_has_only_the_files_that_can_be_read(client: Client) -> None:
    found = client.get("/", Accept="application/json").json
    assert found == {"files": {"empty": 0, "inside": 25600}, "folders": ["step-1"]}


def test_people_see_a_page_whose_links_have_the_token_that_they_gave(client: Client) -> None:
    page = client.get(f"/step-1/deep/?token={TOKEN}")
    assert page.headers["content-type"].startswith("text/html")
    assert f'href="./x%20y%252f%3F%23.bin?token={TOKEN}"' in page.body.decode()
    assert TOKEN not in client.get("/").body.decode()
    assert client.get("/step-1").headers["location"] == "/step-1/"


def test_an_entity_tag_changes_with_the_file(client: Client, folder: Path) -> None:
    path = folder / "step-1" / "changing"
    path.write_bytes(b"one")
    first = client.get("/step-1/changing").headers["etag"]
    assert client.get("/step-1/changing", Range="bytes=1-").headers["etag"] == first
    (folder / "next").write_bytes(b"two")
    (folder / "next").rename(path)
    assert client.get("/step-1/changing").headers["etag"] != first
    path.unlink()


OUTSIDE = [
    "/../secret/key",
    "/%2e%2e/secret/key",
    "/..%2fsecret%2fkey",
    "/step-1/../../secret/key",
    "/./empty",
    "//empty",
    "/step-1//data",
    "//etc/passwd",
    "/%2fetc%2fpasswd",
    "/etc/passwd",
    "/out",
    "/out-folder/key",
    "/out-folder/",
    "/out-folder",
    "/loop",
    "/dangling",
    "/pipe",
    "/socket",
    "/empty%00",
    "/empty%00.txt",
    "/../run-too/key",
    "/" + "a" * 300,
    "/" + "a/" * 3000,
    "/empty/",
    "/empty/x",
    "/%ff%fe",
]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path[:40])
def test_nothing_else_is_served(client: Client, path: str) -> None:
    found = client.get(path)
    assert found.status == 404
    assert found.json["error"] == "unknown"
    assert b"SECRET" not in found.body


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_no_path_has_a_part_that_leads_outside(text: str, is_quoted: bool) -> None:
    try:
        parts = _parts("/" + (quote(text, safe="") if is_quoted else text))
    except RefusedError:
        return
    assert not any(b"/" in part or b"\0" in part for part in parts)
    assert not {b"", b".", b".."} & set(parts)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_folder_is_read_only(client: Client, method: str) -> None:
    assert client.ask(method, "/empty", b"x").status == 405


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer \xff"},
    ],
)
def test_a_token_is_needed(client: Client, headers: dict[str, str]) -> None:
    host = client.connection
    with Client((host.host, host.port), token=None) as other:
        for path in ("/empty", "/", "/nowhere", "/empty?token=", "/empty?token=wrong"):
            found = other.ask("GET", path, **headers)
            assert (found.status, found.json["error"]) == (401, "token")
        assert other.get(f"/empty?token={TOKEN}").status == 200
        for path, order in ((f"/?token={TOKEN}/empty", True), ("/?token=wrong", False)):
            assert ("comes before ?token=" in other.get(path).json["message"]) == order


def test_a_link_that_changes_while_it_is_read_never_leads_outside(
    client: Client, folder: Path
) -> None:
    link, is_over = folder / "changing", threading.Event()

    def change() -> None:
        count = 0
        while not is_over.is_set():
            count += 1
            other = folder / f".{count}"
            other.symlink_to("../secret/key" if count % 2 else "step-1/data")
            other.rename(link)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        found = [client.get("/changing") for _ in range(200)]
    finally:
        is_over.set()
        changing.join()
        link.unlink()
    assert {one.status for one in found} <= {200, 404}
    assert not any(b"SECRET" in one.body for one in found)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    with serving(folder, "--no-token") as (url, process), client_of(url, None) as found:
        found.get("/nowhere")
        before = descriptors_of(process.pid)
        for path in ("/", "/empty", "/step-1/data", "/out", "/pipe", "/empty/", "/step-1"):
            found.get(path)
            found.get(path, Range="bytes=5-1")
            found.ask("HEAD", path)
        until(lambda: descriptors_of(process.pid) == before)


def test_a_server_without_descriptors_says_so_and_not_that_nothing_is_there(folder: Path) -> None:
    app = FolderApp(folder, None)
    request = HttpRequest("GET", "/empty", {}, {}, b"", cast(HttpConnection, None))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (folder / "empty").open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), limits[1]))
        try:
            with pytest.raises(RefusedError, match="open files") as told:
                app._answer(request)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert told.value.status == 503


@pytest.mark.thorough
def test_many_readers_get_the_same_bytes(folder: Path) -> None:
    data = secrets.token_bytes(20 << 20)
    (folder / "large").write_bytes(data)
    with serving(folder, "--no-token") as (url, _):

        def read(at: int) -> bytes:
            with client_of(url, None) as found:
                return found.get("/large", Range=f"bytes={at}-").body

        starts = [number * 1_000_003 for number in range(8)]
        with ThreadPoolExecutor() as pool:
            for at, body in zip(starts, pool.map(read, starts), strict=True):
                assert body == data[at:]
    (folder / "large").unlink()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    chain, key = folder / "chain.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext"]
    made += ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    try:
        subprocess.run(made, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return chain, key


def test_a_folder_is_served_by_https(folder: Path, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    with serving(folder, "--certificate", chain, "--key", key, "--token", TOKEN) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        trusts = ssl.create_default_context(cafile=str(chain))
        data = (folder / "step-1" / "data").read_bytes()
        for _ in range(3):
            where = url.replace("/?", "/step-1/data?")
            with urllib.request.urlopen(where, context=trusts, timeout=60) as answer:
                assert answer.read() == data
        with client_of(url) as plain, pytest.raises((OSError, HTTPException)):
            plain.get("/")
        with pytest.raises(urllib.error.URLError, match="certificate"):
            urllib.request.urlopen(url, timeout=60)


@pytest.mark.thorough
def test_the_token_is_random_and_in_the_printed_url_only(folder: Path) -> None:
    with serving(folder, CKPT_TOKEN="") as (first, _), serving(folder, CKPT_TOKEN="") as (url, one):
        token = url.partition("?token=")[2]
        assert len(token) >= 32
        assert token not in first
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
        assert token not in Path(f"/proc/{one.pid}/cmdline").read_text()


@pytest.mark.thorough
def test_only_this_host_is_served_unless_told_otherwise(folder: Path) -> None:
    with serving(folder) as (url, _):
        assert url.startswith("http://127.0.0.1:")
    for option, said in (("--token=a", "unencrypted"), ("--no-token", "everybody who reaches")):
        with serving(folder, "--address", "0.0.0.0", option) as (url, process):
            assert url.startswith(f"http://{socket.gethostname()}:")
            assert process.stderr is not None
            assert said in process.stderr.readline()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": Path("/nowhere")}, "not a folder"),
        ({"token": ""}, "the token is empty"),
        ({"port": 70_000}, "from 0 to 65535"),
        ({"key": Path("key.pem")}, "a key without a certificate"),
    ],
)
def test_options_that_cannot_be_served_are_errors(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=message):
        ServeOptions(**{"folder": tmp_path, **options})


def test_errors_of_the_command_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pem = tmp_path / "chain.pem"
    pem.write_text("no certificate")
    for arguments, message in [
        (("/nowhere",), "not a folder"),
        (("",), "names no folder"),
        ((tmp_path, "--token", "a", "--no-token"), "exclude each other"),
        ((tmp_path, "--certificate", pem), "no certificate with its key"),
        ((tmp_path, "--address", "203.0.113.1"), "cannot listen there"),
    ]:
        assert main(["serve", *map(str, arguments)]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
