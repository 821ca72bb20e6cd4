"""The requests of calls: told by events, limited by options, and named by a user agent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.installation import __version__
from ckpt.stores.driver import Gate, OwnOptions
from ckpt.stores.store import open_store
from formats.storage import Pool
from sharding.agreement.call_events import Requests
from tests.selection import slow, thorough
from tests.stores.fault_proxy import FaultProxy, Seen
from tests.stores.faults import Fault, nth
from tests.stores.server import Server

pytestmark = pytest.mark.thorough


@pytest.fixture(params=["moto", slow("radosgw"), slow("azurite")])
def proxy(request: pytest.FixtureRequest, servers: Callable[[str], Server]) -> Iterator[FaultProxy]:
    with FaultProxy(servers(request.param)) as opened:
        yield opened


def state(seed: int = 0) -> dict[str, Any]:
    return {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(seed)), "step": 3}


def operation(one: Seen) -> str:
    """The operation of a request, by its method and query."""
    method, query = one.request.method, one.request.target.partition("?")[2]
    if method == "GET" and any(word in query for word in ("list", "uploads", "comp=")):
        return "list"
    if method == "POST":
        return "delete" if query.startswith("delete") else "put"
    return method.lower()


# Events.


def test_events_have_the_requests_and_the_bytes_that_the_server_sees(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/step-1"), proxy.server.options
    for call, action in (
        ("ckpt.save", lambda: ckpt.save(url, state(), storage_options=options)),
        ("ckpt.load", lambda: ckpt.load(url, state(1), storage_options=options)),
    ):
        proxy.clear()
        with ckpt.events.recorded() as events:
            action()
        seen: dict[str, list[int]] = {}
        for one in proxy.seen:
            counts = seen.setdefault(operation(one), [0, 0, 0])
            is_read = operation(one) == "get" and one.status < 300
            sent_bytes = one.received_bytes if one.request.method == "PUT" else 0
            counts[0] += 1
            counts[2] += sent_bytes + (one.sent_bytes if is_read else 0)
        *_, whole = events
        assert (whole.call, whole.stage) == (call, "")
        assert {name: list(counts) for name, counts in whole.requests.items()} == seen


@pytest.mark.thorough
def test_events_have_the_requests_of_the_process_that_writes_in_the_background(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/step-1"), proxy.server.options
    with ckpt.events.recorded() as events:
        ckpt.save(url, state(), storage_options=options, blocking=False).wait()
    *_, whole = events
    assert whole.call == "a save in the background"
    assert whole.requests["put"].nbytes >= 1_200_000


def test_a_request_that_is_sent_again_is_told(proxy: FaultProxy, tmp_path: Path) -> None:
    url, options = proxy.server.url(f"{tmp_path.name}/step-1"), proxy.server.options
    proxy.schedule = nth(0, Fault.UNAVAILABLE, lambda one: one.method == "PUT")
    with ckpt.events.recorded() as events:
        ckpt.save(url, state(), storage_options=options)
    assert proxy.faults() == {Fault.UNAVAILABLE}
    whole = next(one for one in events if one.call == "ckpt.save" and not one.stage)
    assert sum(one.repeated for one in whole.requests.values()) == 1
    assert whole.numbers()["put.repeated"] == 1
    writing = next(one for one in events if one.stage == "writing")
    assert writing.requests["put"].sent >= 1


def test_events_of_a_disk_have_no_requests(tmp_path: Path) -> None:
    with ckpt.events.recorded() as events:
        ckpt.save(tmp_path / "a", state())
        ckpt.load(tmp_path / "a", state(1))
    assert [one.requests for one in events] == [{}] * len(events)


def test_a_line_of_the_log_has_the_numbers_of_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = ckpt.events.log()
    with caplog.at_level("INFO", "ckpt.events"):
        ckpt.save(f"memory://{tmp_path.name}/a", state())
    end()
    line = caplog.records[-1]
    assert " requests" in line.getMessage()
    assert all(isinstance(one, Requests) for one in vars(line)["ckpt_requests"].values())


# Options of ckpt's own.


@pytest.mark.parametrize("most", [1, thorough(3)])
def test_no_more_requests_are_on_their_way_than_the_option_allows(
    proxy: FaultProxy, tmp_path: Path, most: int
) -> None:
    url = proxy.server.url(tmp_path.name)
    proxy.schedule, proxy.delay_seconds = (lambda one: Fault.DELAY), 0.05

    def most_at_once(options: dict[str, Any]) -> int:
        proxy.clear()
        with open_store(url, {**proxy.server.options, **options}) as store, Pool(8) as pool:
            names = [str(number) for number in range(16)]
            list(pool.map(lambda name: store.commit(name, b"x", replace=True), names))
            list(pool.map(lambda name: store.read(name, 0, 1), names))
            store.delete_all(names)
        return proxy.most_at_once

    assert most_at_once({"concurrency": most}) == most
    assert most_at_once({}) > 3


def test_a_save_and_a_load_go_on_with_one_request_at_a_time(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    url = proxy.server.url(f"{tmp_path.name}/step-1")
    options = {**proxy.server.options, "concurrency": 1, "max_bandwidth": "10GB"}
    ckpt.save(url, state(), storage_options=options)
    loaded = ckpt.load(url, {**state(1)}, storage_options=options)
    assert torch.equal(loaded["w"], state()["w"])
    assert proxy.most_at_once == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_bytes_of_any_time_are_at_most_its_bandwidth_and_one_request(seed: int) -> None:
    chance, now, passed = random.Random(seed), [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    gate = Gate(OwnOptions(max_bandwidth=1000.0), clock=lambda: now[0], sleep=sleep)
    for _ in range(200):
        nbytes = chance.choice([0, 1, 50, 5000])
        with gate.passing(nbytes):
            passed += [(now[0], nbytes)] if nbytes else []
        now[0] += chance.choice([0.0, 0.001, 3.0])
    for first, (begin, _) in enumerate(passed):
        total = 0
        for at, nbytes in passed[first:]:
            assert total <= 1000.0 * (at - begin) + 1e-3  # those before this one
            total += nbytes


@pytest.mark.parametrize(
    "option",
    [
        *({"concurrency": value} for value in (0, -1, True, "4", 1.5)),
        *({"max_bandwidth": value} for value in (0, -1.0, float("nan"), True, "fast", [1])),
        *({"user_agent": value} for value in ("a\nb", 3, "é")),
    ],
)
def test_an_option_that_cannot_be_meant_is_an_error_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(ckpt.ArgumentError, match=next(iter(option))):
        open_store("memory://run", option)


def test_each_request_names_ckpt_and_the_caller(proxy: FaultProxy, tmp_path: Path) -> None:
    url = proxy.server.url(f"{tmp_path.name}/step-1")
    options = {**proxy.server.options, "user_agent": "gpt-7b/3"}
    if proxy.server.protocol == "s3":
        options["config_kwargs"] = {"user_agent_extra": "of-the-driver/1"}
    ckpt.save(url, state(), storage_options=options)
    ckpt.load(url, state(1), storage_options=options)
    for one in proxy.seen:
        assert f"ckpt/{__version__} gpt-7b/3" in one.request.agent
        assert ("of-the-driver/1" in one.request.agent) == (proxy.server.protocol == "s3")
    proxy.clear()
    ckpt.load(url, state(1), storage_options=proxy.server.options)
    assert all(f"ckpt/{__version__}" in one.request.agent for one in proxy.seen)
