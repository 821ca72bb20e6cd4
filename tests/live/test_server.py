"""A host server over HTTP: versions, leases, ranges, copies between servers, and its end."""

from __future__ import annotations

import http.client
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import NotACheckpointError, StoreError
from ckpt.live.hosts import Hosts as PublishedHosts
from ckpt.live.hosts import check_room
from ckpt.live.http_server import byte_range
from ckpt.live.process import HostServer
from ckpt.live.protocol import FileAt, RefusedError, Segment
from tests.live.hosts import (
    TOKEN,
    Client,
    Hosts,
    copy,
    is_running,
    memory,
    publish,
    publish_closed,
    random_bytes,
    until,
)

pytestmark = pytest.mark.thorough

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def test_a_version_is_found_leased_and_read(hosts: Hosts) -> None:
    server = hosts.start()
    data = random_bytes(100_000)
    publish_closed(server, 3, f=data)
    client = hosts.client(server)
    found = client.get("/policy").json
    assert (found["newest"], found["versions"], found["server"]) == (3, [3], server.server)
    lease = client.ask("POST", "/policy/leases", {"version": None}).json
    assert lease["version"] == 3
    assert lease["files"] == {"f": {"size": len(data), "at": [list(server.address)]}}
    whole = client.get("/policy/3/f", Ckpt_Lease=lease["lease"])
    assert (whole.status, whole.body) == (200, data)
    part = client.get("/policy/3/f", Range="bytes=10-20")
    assert (part.status, part.body) == (206, data[10:21])
    assert part.headers["content-range"] == f"bytes 10-20/{len(data)}"
    assert part.headers["server"].startswith("ckpt/")
    assert client.get("/policy/3/").json == {"files": {"f": len(data)}, "folders": []}
    assert client.ask("DELETE", f"/policy/leases/{lease['lease']}").status == 200
    assert client.ask("POST", f"/policy/leases/{lease['lease']}").status == 404


def test_the_head_of_a_file_tells_its_size(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"12345", empty=b"")
    client = hosts.client(server)
    found = client.ask("HEAD", "/policy/1/f")
    assert (found.status, found.headers["content-length"], found.body) == (200, "5", b"")
    assert client.get("/policy/1/empty").body == b""
    assert client.get("/policy/1/empty", Range="bytes=0-0").status == 416


def test_a_file_of_several_segments_is_served_as_one(hosts: Hosts) -> None:
    server, client = (started := hosts.start()), hosts.client(started)
    head, arena = memory(b"head"), memory(bytes(range(100)))
    server.put(1, "f", [Segment(head, 0, 4), Segment(arena, 10, 50), Segment(head, 1, 2)])
    server.commit(1, {"f": FileAt(56, (server.address,))})
    whole = b"head" + bytes(range(10, 60)) + b"ea"
    for lo in range(0, 56, 5):
        for hi in range(lo + 1, 57, 7):
            assert client.get("/policy/1/f", Range=f"bytes={lo}-{hi - 1}").body == whole[lo:hi]
    os.close(head)
    os.close(arena)


@given(st.integers(0, 30), st.integers(0, 40), st.integers(0, 40))
def test_a_range_is_that_of_the_header_within_the_file(size: int, lo: int, hi: int) -> None:
    data = bytes(range(size))
    cases = {f"bytes={lo}-{hi}": data[lo : hi + 1], f"bytes={lo}-": data[lo:]}
    cases[f"bytes=-{hi}"] = data[max(size - hi, 0) :]
    for header, wanted in cases.items():
        if wanted:
            first, last = byte_range(header, size)
            assert data[first:last] == wanted
        else:
            with pytest.raises(RefusedError):
                byte_range(header, size)


@pytest.mark.parametrize(
    "header", ["bytes=-", "bytes=1-2,4-5", "items=1-2", "bytes=a-b", "1-2", ""]
)
def test_another_range_is_refused(header: str) -> None:
    with pytest.raises(RefusedError, match="give one range"):
        byte_range(header, 10)


def test_a_question_for_a_newer_version_waits_for_it(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    asking = hosts.client(server)
    assert asking.get("/policy?after=0&wait=60").json["newest"] == 1
    assert asking.get("/policy?after=1&wait=0.05").json["newest"] == 1
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asking.get, "/policy?after=1&wait=60")
        publish_closed(server, 2, f=b"2")
        assert answer.result(timeout=30).json["versions"] == [1, 2]


def test_a_question_of_a_name_that_ends_meanwhile_is_answered(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    asking, holding = hosts.client(server), hosts.client(server)
    lease = holding.lease("policy")  # the server stays for it
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asking.get, "/policy?after=1&wait=60")
        server.remove(60.0)
        assert answer.result(timeout=30).status == 404
    holding.ask("DELETE", f"/policy/leases/{lease}")


def test_a_question_is_answered_before_the_server_ends(hosts: Hosts) -> None:
    server = hosts.start()
    asking, other = hosts.client(server), hosts.client(server)
    asking.get("/policy")
    asking.connection.request("GET", "/policy?after=1&wait=60", headers=AUTHORIZED)
    other.get("/policy")  # the server reads the question first
    server.close()
    assert asking.connection.getresponse().read().startswith(b'{"error": "unknown"')
    until(lambda: not is_running(server.pid))


def test_a_retired_version_waits_for_its_readers_and_is_gone_then(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"old")
    publish_closed(server, 2, f=b"new")
    client = hosts.client(server)
    lease = client.lease("policy", 1)
    with ThreadPoolExecutor() as pool:
        retired = pool.submit(server.retire, 1, 60.0)
        until(lambda: client.get("/policy").json["versions"] == [2])
        assert client.ask("POST", "/policy/leases", {"version": 1}).status == 410
        assert client.get("/policy/1/f", Ckpt_Lease=lease).body == b"old"
        assert not retired.done()
        client.ask("DELETE", f"/policy/leases/{lease}")
        assert retired.result(timeout=30) is False
    gone = client.get("/policy/1/f")
    assert (gone.status, gone.json["error"], gone.json["newest"]) == (410, "gone", 2)
    assert client.get("/policy/9/f").status == 404
    assert server.drop(1, overdue=False) is False
    assert client.get("/policy/1/f").status == 410


def test_a_server_answers_for_its_own_name_alone(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"own")
    client = hosts.client(server)
    lease = client.lease("policy")
    for path in ("/other", "/other/1/f"):
        assert client.get(path).status == 404
    assert client.ask("DELETE", f"/other/leases/{lease}").status == 404
    assert client.ask("POST", f"/policy/leases/{lease}").status == 200
    with HostServer.attach("policy") as second:
        second.name = "other"
        with pytest.raises(NotACheckpointError, match="no live state other is here"):
            second.own()
    assert client.ask("DELETE", f"/policy/leases/{lease}").status == 200


def test_a_reader_that_stalls_holds_a_version_no_longer_than_its_lease(hosts: Hosts) -> None:
    server = hosts.start(lease_seconds=0.3)
    publish_closed(server, 1, f=b"old")
    client = hosts.client(server)
    lease = client.lease("policy")
    assert client.get("/policy/1/f", Ckpt_Lease=lease).status == 200
    assert server.retire(1, 60.0) is True
    assert client.ask("POST", f"/policy/leases/{lease}").status == 404


def test_a_reader_that_renews_for_ever_holds_a_version_no_longer_than_the_deadline(
    hosts: Hosts,
) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"old")
    client, is_over = hosts.client(server), threading.Event()
    lease = client.lease("policy")

    def renew() -> None:
        while not is_over.wait(0.02):
            client.ask("POST", f"/policy/leases/{lease}")

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        assert server.retire(1, 0.3) is True
    finally:
        is_over.set()
        renewing.join()


def test_a_drop_says_whether_bytes_may_be_in_flight(hosts: Hosts) -> None:
    server = hosts.start()
    for version in range(1, 5):
        publish_closed(server, version, f=random_bytes(1000))
    leased, unleased, other = (hosts.client(server) for _ in range(3))
    lease = leased.lease("policy", 1)
    leased.get("/policy/1/f", Ckpt_Lease=lease)
    leased.ask("DELETE", f"/policy/leases/{lease}")
    leased.connection.close()
    # A lease that was released: all bytes have arrived.
    assert server.drop(1, overdue=server.retire(1, 1.0)) is False
    # No lease, and no later request: the bytes may still be in a buffer of the system.
    unleased.get("/policy/2/f")
    assert server.drop(2, overdue=False) is True
    with pytest.raises(OSError):  # the connection was reset
        unleased.get("/policy")
    unleased.connection.close()
    # No lease, but a later request: the reader has had the answer before.
    other.get("/policy/3/f")
    other.get("/policy")
    assert server.drop(3, overdue=False) is False
    # A lease that ended by itself.
    late = other.lease("policy", 4)
    other.get("/policy/4/f", Ckpt_Lease=late)
    assert server.drop(4, overdue=server.retire(4, 0.05)) is True


def test_a_lease_on_another_version_or_an_invented_one_is_none(hosts: Hosts) -> None:
    server = hosts.start(lease_seconds=0.5)
    for version in (1, 2, 3):
        publish_closed(server, version, f=b"12345")
    client, other = hosts.client(server), hosts.client(server)
    for version, lease in ((1, client.lease("policy", 3)), (2, "invented")):
        assert other.get(f"/policy/{version}/f", Ckpt_Lease=lease).body == b"12345"
        assert server.drop(version, overdue=False) is True
        other.close()


def test_a_drop_counts_connections_that_ended_after_their_answer(hosts: Hosts) -> None:
    server = hosts.start()
    for version in (1, 2, 3):
        publish_closed(server, version, f=random_bytes(1000))
    client = hosts.client(server)

    def read(version: int, **headers: str) -> None:
        with Client(server.address) as once:
            assert once.get(f"/policy/{version}/f", Connection="close", **headers).status == 200

    read(1)
    assert server.drop(1, overdue=False) is True
    for version, is_late in ((2, False), (3, True)):
        lease = client.lease("policy", version)
        read(version, Ckpt_Lease=lease)
        if not is_late:
            client.ask("DELETE", f"/policy/leases/{lease}")
        assert server.drop(version, overdue=server.retire(version, 0.05)) is is_late


def test_a_drop_ends_an_answer_on_its_way_and_its_reader_sees_too_few_bytes(hosts: Hosts) -> None:
    server = hosts.start()
    nbytes = 64 << 20
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    server.put(1, "f", [Segment(descriptor, 0, nbytes)])
    os.close(descriptor)
    server.commit(1, {"f": FileAt(nbytes, (server.address,))})
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    connection.request("GET", "/policy/1/f", headers=AUTHORIZED)
    answer = connection.getresponse()
    assert len(answer.read(1000)) == 1000
    assert server.drop(1, overdue=False) is True
    with pytest.raises((OSError, http.client.IncompleteRead)):
        answer.read()
    connection.close()
    publish_closed(server, 2, f=b"new")
    assert hosts.client(server).get("/policy/2/f").body == b"new"


def test_a_reader_that_dies_half_way_disturbs_nobody(hosts: Hosts) -> None:
    server = hosts.start()
    data = random_bytes(16 << 20)
    publish_closed(server, 1, f=data)
    for _ in range(5):
        dying = http.client.HTTPConnection(*server.address, timeout=60)
        dying.request("GET", "/policy/1/f", headers=AUTHORIZED)
        dying.getresponse().read(10)
        dying.close()
    assert hosts.client(server).get("/policy/1/f").body == data


def test_a_file_that_its_publisher_truncated_ends_the_answer_early(hosts: Hosts) -> None:
    server = hosts.start()
    (descriptor,) = publish(server, 1, f=bytes(1 << 20)).values()
    os.ftruncate(descriptor, 1000)
    client = hosts.client(server)
    with pytest.raises((OSError, http.client.HTTPException)):
        client.get("/policy/1/f")
    client.close()
    assert hosts.client(server).get("/policy").json["newest"] == 1
    os.close(descriptor)


@pytest.fixture
def pair(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> list[HostServer]:
    """Servers of one name on two hosts, which here are two folders of sockets."""
    one = hosts.start()
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path_factory.mktemp("two") / "runtime"))
    two = hosts.start()
    return [one, two]


@pytest.mark.thorough
def test_copies_of_files_are_served_by_the_server_that_got_them(
    hosts: Hosts, pair: list[HostServer]
) -> None:
    one, two = pair
    data = random_bytes(3_000_000)
    descriptor = memory(data)
    one.put(1, "f", [Segment(descriptor, 0, len(data))])
    client = hosts.client(two)
    copy(one.address, 1, f=len(data))
    with pytest.raises(StoreError, match="here already"):
        copy(one.address, 1, f=len(data))
    assert one.drop(1, overdue=False) is False  # who copied it has it whole
    os.ftruncate(descriptor, 0)  # a copy, and not the same memory
    assert client.get("/policy/1/f").body == data
    two.commit(1, {"f": FileAt(len(data), (two.address,))})
    assert client.get("/policy").json["newest"] == 1
    two.drop(1)
    assert client.get("/policy/1/f").status == 410
    os.close(descriptor)


def test_copies_have_a_bound_of_memory_which_a_drop_gives_back(pair: list[HostServer]) -> None:
    one, two = pair
    places = PublishedHosts("policy", TOKEN, (0, 1), [one.address, two.address], 1, two)
    two.commit(1, {"f": FileAt(3, (one.address, two.address)), "own": FileAt(9, (two.address,))})
    check_room(places, 4, 1)
    check_room(places, None, 2)
    with pytest.raises(StoreError, match="copies have 3 of the 4 bytes"):
        check_room(places, 4, 2)
    two.drop(1)
    check_room(places, 4, 4)


def test_a_copy_that_fails_leaves_nothing_and_can_be_made_again(pair: list[HostServer]) -> None:
    one, two = pair
    with pytest.raises(StoreError, match="status 404"):
        copy(one.address, 1, f=1_000_000)
    with pytest.raises(StoreError, match="no copy from 127"):
        copy(("127.0.0.1", 1), 1, f=1_000_000)
    (short,) = publish(one, 1, f=bytes(1_000_000)).values()
    os.ftruncate(short, 10)
    with pytest.raises(StoreError, match="no copy"):
        copy(one.address, 1, f=1_000_000)
    assert two.versions() == {}
    os.ftruncate(short, 1_000_000)
    copy(one.address, 1, f=1_000_000)
    os.close(short)


def test_a_name_without_owners_ends_and_its_server_with_it(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    other = HostServer.attach("policy")
    other.own()
    client = hosts.client(server)
    server.close()
    assert client.get("/policy").json["newest"] == 1
    other.close()
    until(lambda: not is_running(server.pid))


def test_readers_finish_after_the_publisher_has_died(hosts: Hosts) -> None:
    server = hosts.start()
    publish_closed(server, 1, f=b"1")
    client = hosts.client(server)
    lease = client.lease("policy")
    server.close()
    until(lambda: client.get("/policy").status == 404)
    assert client.get("/policy/1/f", Ckpt_Lease=lease).body == b"1"
    with hosts.start() as next_one:  # a new publisher need not wait for the old one's readers
        assert next_one.server != server.server
    client.ask("DELETE", f"/policy/leases/{lease}")
    until(lambda: not is_running(server.pid))


def test_a_kept_name_outlives_its_owner_and_a_new_owner_finds_its_versions(hosts: Hosts) -> None:
    server = hosts.start(keep_seconds=600.0)
    publish_closed(server, 7, f=b"7")
    server.close()
    again = hosts.stack.enter_context(HostServer.attach("policy"))
    again.own(600.0)
    assert again.versions()[7].files == {"f": FileAt(1, (server.address,))}
    publish_closed(again, 8, f=b"8")
    assert hosts.client(again).get("/policy").json["versions"] == [7, 8]
    again.remove()
    until(lambda: not is_running(server.pid))


def test_a_kept_name_ends_after_its_time(hosts: Hosts) -> None:
    server = hosts.start(keep_seconds=0.3)
    publish_closed(server, 7, f=b"7")
    before = time.monotonic()
    server.close()
    until(lambda: not is_running(server.pid))
    assert time.monotonic() - before >= 0.3


def test_memory_is_free_when_a_version_is_dropped(hosts: Hosts) -> None:
    server = hosts.start()
    before = open_memory(server.pid)
    publish_closed(server, 1, f=b"1", g=b"2")
    assert open_memory(server.pid) == before + 2
    server.drop(1)
    assert open_memory(server.pid) == before


def open_memory(pid: int) -> int:
    folder = f"/proc/{pid}/fd"
    return sum("memfd:" in os.readlink(f"{folder}/{one}") for one in os.listdir(folder))
