"""The Unix socket of a host server, and the process behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from ckpt.errors import (
    AccessDeniedError,
    ExistsError,
    NotACheckpointError,
    ProtocolError,
    StoreError,
    UnreachableError,
    VersionGoneError,
)
from ckpt.live import control
from ckpt.live.control import receive_message, send_message
from ckpt.live.process import HostOptions, HostServer
from ckpt.live.protocol import MESSAGE_BYTES, MOST_DESCRIPTORS, FileAt, Segment
from ckpt.live.store import LiveStore
from tests.live.hosts import (
    TOKEN,
    Client,
    Hosts,
    check_no_more_descriptors,
    descriptors_of,
    in_its_place,
    is_running,
    memory,
    publish_closed,
    until,
)

pytestmark = pytest.mark.thorough


def test_a_reader_of_the_same_host_gets_the_memory_itself(hosts: Hosts) -> None:
    server = hosts.start()
    head, arena = memory(b"head"), memory(bytes(range(100)))
    server.put(1, "f", [Segment(head, 1, 2), Segment(arena, 10, 5), Segment(head, 0, 1)])
    server.commit(1, {"f": FileAt(8, (server.address,))})
    with HostServer.attach("policy") as reader:
        parts = reader.get(1, "f", TOKEN)
        assert b"".join(os.pread(p.descriptor, p.nbytes, p.offset) for p in parts) == (
            b"ea" + bytes(range(10, 15)) + b"h"
        )
        assert os.fstat(parts[1].descriptor).st_ino == os.fstat(arena).st_ino
        assert server.drop(1, overdue=False) is True  # the reader still has descriptors
        os.ftruncate(arena, 0)
        assert os.pread(parts[1].descriptor, 5, 10) == b""
    for descriptor in {head, arena, *(part.descriptor for part in parts)}:
        os.close(descriptor)


def test_memory_is_free_for_its_publisher_once_the_reader_has_closed(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    before = descriptors_of(server.pid)
    with HostServer.attach("policy") as reader:
        for part in reader.get(1, "f", TOKEN):
            os.close(part.descriptor)
    until(lambda: descriptors_of(server.pid) == before)
    assert server.drop(1, overdue=False) is False


def test_a_lease_over_the_socket_comes_with_the_files_and_ends_with_the_connection(
    hosts: Hosts,
) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"first", g=b"second")
    with HostServer.attach("policy") as reader:
        found, here = reader.take(None, server.address, TOKEN)
        assert (found["version"], found["server"]) == (1, server.server)
        assert bytes_of(here) == {"f": b"first", "g": b"second"}
        assert server.retire(1, wait_seconds=0.05) is True  # its reader has not said a word
    publish_closed(server, 2, f=b"third")
    with HostServer.attach("policy") as reader:
        bytes_of(reader.take(2, server.address, TOKEN)[1])
    assert server.retire(2, wait_seconds=60) is False


def test_a_killed_reader_holds_up_no_publisher(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    code = (
        "import os; from ckpt.live.process import HostServer; "
        f"HostServer.attach('policy').take(1, {server.address!r}, {TOKEN!r}); "
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    assert server.retire(1, wait_seconds=60) is False


def test_a_lease_needs_the_address_and_the_token_of_the_server(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    host, port = server.address
    with HostServer.attach("policy") as reader:
        with pytest.raises(NotACheckpointError, match="has the address"):
            reader.take(1, (host, port - 1), TOKEN)
        with pytest.raises(AccessDeniedError, match="the token is wrong"):
            reader.take(1, server.address, "another")
        assert server.retire(1, wait_seconds=60) is False


def test_a_lease_has_as_many_descriptors_as_a_message_can_have(hosts: Hosts) -> None:
    server = hosts.start()
    files = {f"f{at}": b"%d" % at for at in range(MOST_DESCRIPTORS + 5)}
    publish_closed(server, 1, **files)
    with HostServer.attach("policy") as reader:
        found, here = reader.take(1, server.address, TOKEN)
        assert found["files"].keys() == files.keys()
        assert len(here) == MOST_DESCRIPTORS
        rest = {name: reader.get(1, name, TOKEN) for name in files.keys() - here.keys()}
        assert bytes_of({**here, **rest}) == files


LEASE: dict[str, object] = {
    "lease": "a-key",
    "version": 1,
    "seconds": 30.0,
    "server": "an-id",
    "files": {"f": {"size": 5, "at": [["127.0.0.1", 1]]}},
    "here": {"f": [[0, 0, 5]]},
}
"""An answer to `take`, with one descriptor."""


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [
        ({"ok": {**LEASE, "here": {"f": [[1, 0, 5]]}}}, 1),
        ({"ok": {**LEASE, "here": {"f": [[0, 0]]}}}, 1),
        ({"ok": {**LEASE, "here": {"f": [[0, 0, 5]], "g": [[0, 0, 5]]}}}, 1),
        ({"ok": {**LEASE, "here": []}}, 1),
        ({"ok": {**LEASE, "here": {}}}, 2),
        ({"ok": {"lease": "a-key"}}, 1),
        ({"ok": [1]}, 1),
        ({"okay": LEASE}, 1),
        ({"error": "token"}, 1),
        ({"error": ["token"], "message": "no"}, 1),
    ],
)
def test_an_answer_of_another_form_is_an_error_and_leaves_no_descriptor(
    runtime: Path, answer: dict[str, object], descriptors: int
) -> None:
    before = descriptors_of()
    with (
        in_its_place("policy", answer, descriptors=descriptors),
        HostServer("policy") as server,
        pytest.raises(ProtocolError, match="gave an answer of another form"),
    ):
        server.take(None, ("127.0.0.1", 1), TOKEN)
    check_no_more_descriptors(before)


def test_a_lease_that_cannot_be_read_leaves_no_descriptor(runtime: Path) -> None:
    before = descriptors_of()
    answer = {"ok": {**LEASE, "seconds": "long"}}
    with (
        in_its_place("policy", answer, descriptors=1),
        LiveStore("live://127.0.0.1:1/policy", {}) as store,
        pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1: no server answers"),
    ):
        store.names()
    check_no_more_descriptors(before)


def test_a_reader_whose_connection_the_server_ends_reads_by_http(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"12345")
    host, port = server.address
    with (
        in_its_place("policy"),
        LiveStore(f"live://{host}:{port}/policy?token={TOKEN}", {}) as store,
    ):
        assert store.read("f", 0, 5) == b"12345"


def test_a_server_takes_the_place_of_one_that_is_ending(hosts: Hosts) -> None:
    with in_its_place("policy"):
        with pytest.raises(UnreachableError, match="the server has ended"):
            HostServer.attach("policy")
        assert hosts.start().versions() == {}


def bytes_of(files: dict[str, tuple[Segment, ...]]) -> dict[str, bytes]:
    """The bytes of files of one descriptor each, which are closed."""
    found = {}
    for name, parts in files.items():
        found[name] = b"".join(os.pread(p.descriptor, p.nbytes, p.offset) for p in parts)
        os.close(parts[0].descriptor)
    return found


def test_requests_that_do_not_fit_are_named_errors(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 2, f=b"1")
    place = {"f": FileAt(1, (server.address,))}
    with pytest.raises(ExistsError, match="policy/1 is not newer than version 2"):
        server.commit(1, place)
    with pytest.raises(ExistsError, match="policy/2/f is here already"):
        server.put(2, "f", [])
    with pytest.raises(AccessDeniedError, match="the token is wrong"):
        server.get(2, "f", "another")
    with pytest.raises(NotACheckpointError, match="policy/2/g is not here"):
        server.get(2, "g", TOKEN)
    with pytest.raises(NotACheckpointError, match="policy/9"):
        server.retire(9, 0.0)
    server.drop(2)
    with pytest.raises(VersionGoneError, match="version 2 was replaced"):
        server.get(2, "f", TOKEN)
    with pytest.raises(ProtocolError, match="version=-1"):
        server.commit(-1, place)
    with pytest.raises(ProtocolError, match="file='a/b'"):
        server.get(3, "a/b", TOKEN)


def test_segments_outside_of_their_memory_are_refused(hosts: Hosts) -> None:
    server = hosts.start()
    descriptor, (theirs, ours) = memory(b"12345"), os.pipe()
    for segments in ([Segment(descriptor, 3, 3)], [Segment(theirs, 0, 1)], [Segment(ours, 0, 0)]):
        with pytest.raises(ProtocolError, match="are not in descriptor"):
            server.put(1, "f", segments)
    assert server.versions() == {}
    for one in (descriptor, theirs, ours):
        os.close(one)


def test_refused_descriptors_are_closed(hosts: Hosts) -> None:
    server = hosts.start()
    descriptor = memory(b"12345")
    before = descriptors_of(server.pid)
    for _ in range(10):
        with pytest.raises(ProtocolError):
            server.put(1, "f", [Segment(descriptor, 3, 3)])
        message = json.dumps({"do": "versions", "name": "policy"}).encode()
        send_message(server._connection, message, [descriptor])
        assert b"only put comes with descriptors" in receive_message(server._connection)[0]
    assert descriptors_of(server.pid) == before
    os.close(descriptor)


def test_messages_longer_than_a_datagram_arrive(hosts: Hosts) -> None:
    server = hosts.start()
    place = FileAt(1, (server.address, ("a-host-with-a-long-name.of-a-cluster", 4000)))
    files = {f"{rank:016x}-00000.safetensors": place for rank in range(5000)}
    server.commit(1, files, {"text": "x" * MESSAGE_BYTES})
    found = server.versions()[1]
    assert found.files == files
    assert found.info == {"text": "x" * MESSAGE_BYTES}


def test_a_server_that_retires_a_version_answers_others_meanwhile(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    client = hosts.client(server)
    lease = client.lease("policy")
    with ThreadPoolExecutor() as pool, HostServer.attach("policy") as other:
        retired = pool.submit(server.retire, 1, 60.0)
        until(lambda: other.versions() == {})
        client.ask("DELETE", f"/policy/leases/{lease}")
        assert retired.result(timeout=30) is False


def test_a_version_is_retired_and_then_dropped_where_a_server_cannot_do_both_at_once(
    runtime: Path,
) -> None:
    refusal = {"error": "protocol", "message": "do='reclaim': the requests are ..."}
    answers = (refusal, {"ok": {"overdue": True}}, {"ok": {"held": True}})
    with in_its_place("policy", *answers) as requests, HostServer("policy") as server:
        assert server.reclaim(3, 2.0) is True
    wait, version = {"wait_seconds": 2.0}, {"name": "policy", "version": 3}
    assert requests == [
        {"do": "reclaim", **version, **wait},
        {"do": "retire", **version, **wait},
        {"do": "drop", **version, "overdue": True},
    ]


def test_a_request_after_an_interrupted_one_gets_its_own_answer(hosts: Hosts) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    server, main = hosts.start(), threading.get_ident()
    publish_closed(server, 1, f=b"1")
    lease = hosts.client(server).lease("policy")

    def interrupt() -> None:
        with HostServer.attach("policy") as other:
            until(lambda: other.versions() == {})
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        server.retire(1, wait_seconds=60)
    thread.join()
    hosts.client(server).ask("DELETE", f"/policy/leases/{lease}")
    assert server.versions() == {}
    assert server.drop(1) is False


def test_one_name_has_one_server_on_a_host(hosts: Hosts) -> None:
    server = hosts.start()
    with pytest.raises(ExistsError, match=f"by process {server.pid}; take another name"):
        HostServer.start(HostOptions("policy", TOKEN))


@pytest.mark.thorough
def test_publishers_that_start_together_get_one_server(hosts: Hosts) -> None:
    def start(_: int) -> HostServer | None:
        try:
            return hosts.start()
        except ExistsError:
            return None

    with ThreadPoolExecutor() as pool:
        found = [one for one in pool.map(start, range(4)) if one is not None]
    assert len(found) == 1
    with HostServer.attach("policy") as other:
        assert other.server == found[0].server


def test_the_socket_of_a_killed_server_is_replaced(hosts: Hosts) -> None:
    server = hosts.start()
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not is_running(server.pid))
    with pytest.raises(UnreachableError, match="the server has ended"):
        server.versions()
    with pytest.raises(UnreachableError, match="no server listens"):
        HostServer.attach("policy")
    assert hosts.start().server != server.server


@pytest.mark.thorough
def test_a_server_that_starts_removes_sockets_of_killed_ones_and_no_others(
    hosts: Hosts, runtime: Path
) -> None:
    def socket_of(name: str) -> Path:
        return control.socket_path(name)

    killed, crashed, running = (hosts.start(name) for name in ("killed", "crashed", "running"))
    for server in (killed, crashed):
        os.kill(server.pid, signal.SIGKILL)
        until(lambda pid=server.pid: not is_running(pid))  # type: ignore[misc]
    log = socket_of("crashed").with_suffix(".log")
    log.write_text("the reason")
    kept = [socket_of("file"), socket_of("killed").with_name("killed@elsewhere.sock")]
    kept[0].write_text("a file")
    control.bind(kept[1]).close()
    assert socket_of("killed").exists()
    hosts.start("next")
    left = {path.name for path in runtime.glob("*")}
    there = [socket_of("running"), socket_of("next")]
    logs = [path.with_suffix(".log") for path in there]
    assert left == {path.name for path in [*there, *logs, *kept, log]} | {"lock"}
    assert running.versions() == {}
    for path in (*kept, log):
        path.unlink()


def test_a_server_ignores_signals_to_the_job(hosts: Hosts) -> None:
    server = hosts.start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(server.pid, number)
    assert server.versions() == {}
    assert os.getsid(server.pid) == server.pid


@pytest.mark.thorough
def test_a_server_outlives_the_process_that_started_it_by_one_lease_also_if_a_reader_renews(
    hosts: Hosts, runtime: Path
) -> None:
    program = (
        "import os, sys; from ckpt.live.process import HostOptions, HostServer; "
        "options = HostOptions('policy', 'a-token', lease_seconds=0.5); "
        "server = HostServer.start(options); server.own(); "
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        with HostServer.attach("policy") as reader:
            assert reader.pid == pid
            publish_closed(reader, 1, f=b"1")
            client = Client(reader.address)
        with client, suppress(OSError, HTTPException):
            lease = client.lease("policy")
            trainer.kill()
            while client.ask("POST", f"/policy/leases/{lease}").status == 200:
                pass  # and once more
    until(lambda: not is_running(pid))


def test_a_forked_child_does_not_keep_a_name(hosts: Hosts) -> None:
    server = hosts.start()
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.read(theirs, 1)  # until the test is over
        os._exit(0)
    server.close()
    until(lambda: not is_running(server.pid))
    os.close(ours)
    os.close(theirs)
    os.waitpid(child, 0)


def test_the_server_has_no_torch_and_neither_the_token_in_its_arguments(hosts: Hosts) -> None:
    server = hosts.start()
    libraries = Path(f"/proc/{server.pid}/maps").read_text()
    assert "torch" not in libraries
    assert TOKEN not in Path(f"/proc/{server.pid}/cmdline").read_text()


def test_an_address_of_another_host_is_an_error(hosts: Hosts) -> None:
    with pytest.raises(StoreError, match=r"cannot listen at 203\.0\.113\.1:0"):
        HostServer.start(HostOptions("policy", TOKEN, "203.0.113.1"))


def test_a_folder_of_sockets_that_others_can_open_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    with pytest.raises(StoreError, match="mode 0700"):
        HostServer.start(HostOptions("policy", TOKEN))
    runtime.rmdir()
    runtime.write_text("a file in its place")
    with pytest.raises(StoreError, match="cannot be made: File exists; set CKPT_RUNTIME_DIR"):
        HostServer.attach("policy")
    runtime.unlink()
    runtime.symlink_to(runtime.parent)
    with pytest.raises(StoreError, match="a folder of this user"):
        HostServer.attach("policy")


def test_long_names_and_folders_have_sockets(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    names = ["n" * 128, "n" * 127 + "m"]
    paths = {control.socket_path(name) for name in names}
    assert len(paths) == 2
    assert all(len(path.name) < 128 for path in paths)
    monkeypatch.undo()
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / ("deep" * 20) / ("deeper" * 20)))
    server = hosts.start("n" * 128)
    server.close()
    until(lambda: not is_running(server.pid))
