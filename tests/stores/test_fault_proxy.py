"""The proxy hides nothing and adds nothing, but for the faults that it was asked for."""

import http.client
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError, HTTPClientError

from tests.selection import thorough
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import Fault, Request, dead_between, once, seeded, times
from tests.stores.server import Server, s3_client

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture(params=["moto", thorough("radosgw")])
def server(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Server:
    return servers(request.param)


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


def put(server: Server, key: str, content: bytes = CONTENT) -> None:
    s3_client(server).put_object(Bucket=server.bucket, Key=key, Body=content)


def get(server: Server, key: str, lo: int = 0, hi: int = len(CONTENT)) -> bytes:
    got = s3_client(server).get_object(Bucket=server.bucket, Key=key, Range=f"bytes={lo}-{hi - 1}")
    return got["Body"].read()


def answer(proxy: FaultProxy, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one unsigned request, tried once."""
    host = proxy.server.endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.request(method, target, body or None)
        found = connection.getresponse()
        return found.status, found.read()
    finally:
        connection.close()


def test_what_goes_through_is_unchanged_and_counted(proxy: FaultProxy) -> None:
    key = "proxy/a name with + and % and ü"
    put(proxy.server, key)
    assert get(proxy.server, key, 1000, 2_000_001) == CONTENT[1000:2_000_001]
    with pytest.raises(ClientError):
        s3_client(proxy.server).head_object(Bucket=proxy.server.bucket, Key="proxy/absent")
    assert [one.request.method for one in proxy.seen] == ["PUT", "GET", "HEAD"]
    assert [one.status for one in proxy.seen] == [200, 206, 404]
    assert proxy.seen[0].received_bytes >= len(CONTENT)
    assert proxy.sent_bytes == 1_999_001
    assert proxy.seen[1].request.reads_data
    assert proxy.seen[1].request.range == "bytes=1000-2000000"
    assert not proxy.faults()


@pytest.mark.thorough
def test_many_connections_at_once_do_not_mix(proxy: FaultProxy) -> None:
    put(proxy.server, "proxy/many")
    bounds = [(i * 1000, i * 1000 + 500_000 + i) for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda bound: get(proxy.server, "proxy/many", *bound), bounds))
    assert got == [CONTENT[lo:hi] for lo, hi in bounds]
    assert proxy.count("GET") == 24


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.DENIED, 403),
        (Fault.BROKEN, 500),
        (Fault.UNAVAILABLE, 503),
        (Fault.SLOW_DOWN, 503),
    ],
)
def test_a_refusal_has_its_status_and_code(proxy: FaultProxy, fault: Fault, status: int) -> None:
    proxy.schedule = once(fault)
    got, body = answer(proxy, "PUT", "/checkpoints/proxy/x", b"content")
    assert got == status
    assert b"<Error><Code>" in body
    assert proxy.faults() == {fault}


@pytest.mark.parametrize("fault", [Fault.DROP_REQUEST, Fault.DROP_ANSWER, Fault.CUT_ANSWER])
def test_a_dropped_connection_is_one(proxy: FaultProxy, fault: Fault) -> None:
    proxy.schedule = once(fault)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        answer(proxy, "GET", "/")


def test_a_request_dropped_in_its_middle_was_not_carried_out(proxy: FaultProxy) -> None:
    proxy.schedule = times(99, Fault.DROP_REQUEST, lambda request: request.writes_data)
    with pytest.raises(HTTPClientError):
        put(proxy.server, "proxy/dropped")
    with pytest.raises(ClientError):
        s3_client(proxy.server).head_object(Bucket=proxy.server.bucket, Key="proxy/dropped")


def test_a_request_whose_answer_is_dropped_was_carried_out(proxy: FaultProxy) -> None:
    proxy.schedule = times(99, Fault.DROP_ANSWER, lambda request: request.writes_data)
    with pytest.raises(HTTPClientError):
        put(proxy.server, "proxy/carried-out")
    assert get(proxy.server, "proxy/carried-out") == CONTENT


def test_a_short_answer_is_well_formed_and_a_flipped_one_differs_in_a_bit(
    proxy: FaultProxy,
) -> None:
    put(proxy.server, "proxy/data")
    proxy.schedule = once(Fault.SHORT_ANSWER, lambda request: request.reads_data)
    assert get(proxy.server, "proxy/data") == CONTENT[: len(CONTENT) // 2]
    proxy.schedule = once(Fault.FLIP_ANSWER, lambda request: request.reads_data)
    got = get(proxy.server, "proxy/data")
    different = [i for i in range(len(CONTENT)) if got[i] != CONTENT[i]]
    assert different == [len(CONTENT) // 2]
    assert proxy.faults() == {Fault.SHORT_ANSWER, Fault.FLIP_ANSWER}


def test_in_an_outage_nothing_is_reached_and_afterwards_all(proxy: FaultProxy) -> None:
    with proxy.outage(), pytest.raises((OSError, http.client.HTTPException)):
        answer(proxy, "GET", "/")
    assert answer(proxy, "GET", "/")[0] in (200, 403)
    proxy.clear()
    proxy.schedule = dead_between(1, 3)
    assert answer(proxy, "GET", "/")[0] in (200, 403)
    for _ in range(2):
        with pytest.raises((OSError, http.client.HTTPException)):
            answer(proxy, "GET", "/")
    assert answer(proxy, "GET", "/")[0] in (200, 403)


def test_a_hanging_request_ends_with_the_proxy(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        with FaultProxy(server, once(Fault.HANG, lambda one: one.target == "/hang")) as proxy:
            hanging = pool.submit(answer, proxy, "GET", "/hang")
            assert answer(proxy, "GET", "/")[0] in (200, 403)
        assert isinstance(hanging.exception(), (OSError, http.client.HTTPException))


def test_a_schedule_is_the_same_for_a_seed_and_a_number() -> None:
    requests = [Request(number, "GET", "/", "", 0) for number in range(1000)]
    faults = [Fault.BROKEN, Fault.DELAY]
    chosen = [seeded(1, 0.3, faults)(request) for request in requests]
    assert chosen == [seeded(1, 0.3, faults)(request) for request in requests]
    assert chosen != [seeded(2, 0.3, faults)(request) for request in requests]
    assert 200 < sum(fault is not None for fault in chosen) < 400
    assert set(chosen) == {None, *faults}
