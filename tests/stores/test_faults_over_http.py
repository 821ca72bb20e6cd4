"""Saves and loads of two ranks while the network and the server fail them.

Whatever happens, what was committed before stays whole, a save that says it succeeded can be
loaded, and no load gives anything but what was saved: it is right, or an error that says where.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.stores.store import open_store
from tests.selection import slow, thorough
from tests.stores import states
from tests.stores.fault_proxy import FaultProxy
from tests.stores.faults import TRANSIENT, Fault, Request, dead_between, nth, once, seeded
from tests.stores.places import GCS, SERVERS, Place, place_at
from tests.stores.server import Server

pytestmark = pytest.mark.thorough

DEADLINE_SECONDS = 4
"""After which a store gives up, here."""
ANSWER_SECONDS = 2
"""After which a request that is not answered has failed, here."""
QUICK = (Fault.DROP_ANSWER, Fault.CUT_ANSWER, Fault.FLIP_ANSWER, Fault.SLOW_DOWN)
SPECIAL = (Fault.HANG, Fault.LATE, Fault.TWICE)
"""Those with tests of their own."""
HARMLESS = (*TRANSIENT, Fault.SHORT_ANSWER)
"""What is mended by another try."""


KINDS = ["moto", *map(slow, SERVERS[1:3])]
"""Google's driver makes retries of its own, which this module does not measure."""


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]
) -> Place:
    return place_at(request.param, tmp_path, servers)


@pytest.fixture
def proxy(place: Place) -> Iterator[FaultProxy]:
    assert place.server is not None
    with FaultProxy(place.server, delay_seconds=0.05) as proxy:
        yield proxy


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save or a load ended."""

    error: str | None
    """Class and message."""
    seconds: float


def tried(
    clusters: Callable, job: str, proxy: FaultProxy, url: str, seed: int, **how: Any
) -> Outcome:
    """How a save or load by two ranks through the proxy ended; it is the same on both."""
    options = dict(proxy.server.options)
    if proxy.server.protocol == "s3":
        options["config_kwargs"] = {"read_timeout": ANSWER_SECONDS}
    both = clusters(2).run(states.tried, job, url, options, seed, DEADLINE_SECONDS, how)
    outcomes = [Outcome(*one) for one in both]
    assert len({outcome.error is None for outcome in outcomes}) == 1, outcomes
    return max(outcomes, key=lambda outcome: outcome.seconds)


def assert_right_or_absent(place: Place, url: str, seed: int) -> bool:
    """Whether there is a checkpoint; raises when it is one and neither right nor found damaged."""
    try:
        found = ckpt.read(url, storage_options=place.options)
    except ckpt.NotACheckpointError:
        return False
    assert isinstance(found, dict)
    states.assert_same(found, seed)
    return True


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault in QUICK else pytest.mark.slow)
        for fault in Fault
        if fault not in SPECIAL
    ],
)
def test_a_save_and_a_load_are_right_or_an_error_that_says_where(
    clusters: Callable, place: Place, proxy: FaultProxy, fault: Fault
) -> None:
    earlier, later = f"{place.url}/step-1", f"{place.url}/step-2"
    clusters(2).run(states.save, earlier, place.options, 1, {})

    proxy.schedule = seeded(7, 0.2, [fault])
    saving = tried(clusters, "save", proxy, later, 2)
    loading = tried(clusters, "load", proxy, earlier, 1)
    assert proxy.faults() == {fault}

    for outcome in (saving, loading):
        assert outcome.seconds < 5 * DEADLINE_SECONDS
        if outcome.error is not None:
            assert "step-" in outcome.error
        if fault in HARMLESS:
            assert outcome.error is None, outcome
    assert ckpt.verify(earlier, storage_options=place.options).sound
    if fault is Fault.FLIP_REQUEST and saving.error is None:
        if not ckpt.verify(later, storage_options=place.options).sound:
            with pytest.raises(ckpt.CorruptError):
                ckpt.read(later, storage_options=place.options)
    else:
        is_there = assert_right_or_absent(place, later, 2)
        assert is_there or saving.error is not None


@pytest.mark.thorough
@pytest.mark.parametrize("job", ["save", "load"])
def test_a_request_that_is_never_answered_is_made_again(
    clusters: Callable, place: Place, proxy: FaultProxy, job: str
) -> None:
    if place.kind == "azurite":
        pytest.skip("the time for an answer, 60 s, is no option of this driver")
    url = f"{place.url}/step-1"
    if job == "load":
        clusters(2).run(states.save, url, place.options, 1, {})
    proxy.schedule = once(Fault.HANG, lambda one: one.writes_data or one.reads_data)
    assert tried(clusters, job, proxy, url, 1).error is None
    assert proxy.faults() == {Fault.HANG}
    assert assert_right_or_absent(place, url, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_many_faults_of_all_kinds_lose_nothing(
    clusters: Callable, place: Place, proxy: FaultProxy, seed: int
) -> None:
    chance = random.Random(seed)
    kinds = [fault for fault in Fault if fault not in (*SPECIAL, Fault.FLIP_REQUEST)]
    earlier, later = f"{place.url}/step-1", f"{place.url}/step-2"
    clusters(2).run(states.save, earlier, place.options, 1, {})
    proxy.schedule = seeded(seed, chance.choice([0.05, 0.2, 0.5]), kinds)
    how = chance.choice([{}, {"compress": True}, {"base": earlier}])
    saving = tried(clusters, "save", proxy, later, 2, **how)
    tried(clusters, "load", proxy, earlier, 1)
    assert ckpt.verify(earlier, storage_options=place.options).sound
    assert assert_right_or_absent(place, later, 2) or saving.error is not None
    proxy.schedule = seeded(0, 0, kinds)
    assert tried(clusters, "save", proxy, later, 3, overwrite=True).error is None
    assert assert_right_or_absent(place, later, 3)


def writes_the_manifest(request: Request) -> bool:
    return request.method in ("PUT", "POST") and "manifest.json" in request.target


def test_a_commit_whose_answer_is_lost_is_known_for_ones_own(
    clusters: Callable, place: Place, proxy: FaultProxy
) -> None:
    url = f"{place.url}/step-1"
    proxy.schedule = once(Fault.DROP_ANSWER, writes_the_manifest)
    assert tried(clusters, "save", proxy, url, 1).error is None
    assert proxy.faults() == {Fault.DROP_ANSWER}
    assert assert_right_or_absent(place, url, 1)
    again = tried(clusters, "save", proxy, url, 2)
    assert again.error is not None
    assert "overwrite=True" in again.error
    proxy.schedule = once(Fault.DROP_ANSWER, writes_the_manifest)
    assert tried(clusters, "save", proxy, url, 2, overwrite=True).error is None
    assert proxy.faults() == {Fault.DROP_ANSWER}
    assert assert_right_or_absent(place, url, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("place", [*KINDS, *map(slow, GCS)], indirect=True)
def test_a_late_request_of_an_earlier_save_does_not_touch_a_later_checkpoint(
    place: Place, proxy: FaultProxy
) -> None:
    def save(value: int) -> None:
        state = {"w": torch.full((10,), float(value))}
        ckpt.save(url, state, overwrite=True, storage_options=proxy.server.options)

    def value_now() -> float:
        return float(ckpt.read(url, storage_options=place.options)["w"][0])

    url = f"{place.url}/step-1"
    save(0)
    save(0)  # finds out how the server takes conditions
    proxy.schedule = once(Fault.LATE, writes_the_manifest)
    save(1)
    save(2)
    assert proxy.deliver() == [412]
    assert value_now() == 2
    deletes = once(Fault.LATE, lambda one: one.method == "DELETE" and "manifest.json" in one.target)
    proxy.schedule = deletes
    ckpt.delete(url, storage_options=proxy.server.options)
    save(3)
    late = proxy.deliver()
    if place.kind != "radosgw":  # which has no condition for a DELETE
        assert late in ([412], [404])
        assert value_now() == 3


def test_an_outage_shorter_than_the_deadline_is_outlasted(
    clusters: Callable, place: Place, proxy: FaultProxy
) -> None:
    url = f"{place.url}/step-1"
    proxy.schedule = dead_between(3, 12)
    assert tried(clusters, "save", proxy, url, 1).error is None
    assert Fault.DROP_REQUEST in proxy.faults()
    assert assert_right_or_absent(place, url, 1)


@pytest.mark.thorough
def test_a_server_that_stays_away_is_an_error_within_the_deadline_and_the_next_save_succeeds(
    clusters: Callable, place: Place, proxy: FaultProxy
) -> None:
    earlier, later = f"{place.url}/step-1", f"{place.url}/step-2"
    clusters(2).run(states.save, earlier, place.options, 1, {})
    proxy.schedule = dead_between(5, 1 << 40)
    saving = tried(clusters, "save", proxy, later, 2)
    assert saving.error is not None
    assert "step-2" in saving.error
    assert saving.seconds < 5 * DEADLINE_SECONDS
    proxy.schedule = dead_between(0, 0)
    assert not assert_right_or_absent(place, later, 2)
    assert ckpt.verify(earlier, storage_options=place.options).sound
    assert tried(clusters, "save", proxy, later, 3).error is None
    assert assert_right_or_absent(place, later, 3)


def reads_an_object(request: Request) -> bool:
    is_listing = "list-type" in request.target or "comp=list" in request.target
    return request.method == "GET" and "step-1" in request.target and not is_listing


READERS: dict[str, Callable[[str, Any, Path], Any]] = {
    "read": lambda url, options, _: ckpt.read(url, storage_options=options),
    "open": lambda url, options, _: {
        name: tensor[:] for name, tensor in ckpt.open(url, storage_options=options).items()
    },
    "verify": lambda url, options, _: (
        ckpt.verify(url, storage_options=options).sound and ckpt.read(url, storage_options=options)
    ),
    "diff": lambda url, options, folder: (
        ckpt.diff(url, folder.parent / "ours", storage_options=options).equal
        and ckpt.read(folder.parent / "ours")
    ),
    "convert": lambda url, options, folder: (
        ckpt.convert(url, folder / "copy", storage_options=options) and ckpt.read(folder / "copy")
    ),
}


@pytest.mark.parametrize("compress", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", ["read", *map(thorough, ("verify", "open", "convert", "diff"))])
def test_a_bit_that_the_network_flips_is_read_again_and_told(
    place: Place, proxy: FaultProxy, tmp_path: Path, reader: str, compress: bool
) -> None:
    url, state = f"{place.url}/step-1", states.whole(1)
    ckpt.save(url, state, storage_options=place.options, compress=compress)
    ckpt.save(tmp_path / "ours", state)
    READERS[reader](url, proxy.server.options, tmp_path / "warm")
    requests = sum(reads_an_object(one.request) for one in proxy.seen)
    assert requests >= 3
    for number in range(requests):
        proxy.schedule = nth(number, Fault.FLIP_ANSWER, reads_an_object)
        with pytest.warns(ckpt.errors.WireWarning, match="were right when read again") as told:
            found = READERS[reader](url, proxy.server.options, tmp_path / f"{number}")
        assert len(told) == 1
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_record_with_one_checksum_is_read_again_as_a_whole(
    place: Place, proxy: FaultProxy, tmp_path: Path, kind: str
) -> None:
    state = {"w": torch.arange(300_000.0), "v": torch.ones(3)}
    options = {"storage_options": place.options}
    ckpt.save(tmp_path / "ours", state)
    url = f"{place.url}/step-1{'.pt' if kind == 'torch' else ''}"
    ckpt.convert(tmp_path / "ours", url, to=kind, **options)
    with ckpt.events.recorded() as events:
        ckpt.load(url, state, storage_options=proxy.server.options)
    whole = [one for one in events if not one.stage]
    assert whole[-1].rereads == 0
    requests = [one for one in proxy.seen if one.request.reads_data]
    [number] = [i for i, one in enumerate(requests) if one.sent_bytes >= 1_200_000]
    proxy.schedule = nth(number, Fault.FLIP_ANSWER, lambda request: request.reads_data)
    target = {"w": torch.zeros(300_000), "v": torch.zeros(3)}
    with ckpt.events.recorded() as events, pytest.warns(ckpt.errors.WireWarning):
        ckpt.load(url, target, storage_options=proxy.server.options)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    assert [one.rereads for one in events if not one.stage][-1] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("reader", READERS)
def test_a_compressed_record_is_read_again(
    place: Place, proxy: FaultProxy, tmp_path: Path, reader: str
) -> None:
    state = {"w": torch.arange(30_000.0)}
    np.savez_compressed(tmp_path / "ours.npz", **{name: one.numpy() for name, one in state.items()})
    ckpt.save(tmp_path / "ours", state)
    with open_store(place.url, place.options) as store:
        store.commit("step-1.npz", (tmp_path / "ours.npz").read_bytes(), replace=True)
    url, options = f"{place.url}/step-1.npz", proxy.server.options
    READERS[reader](url, options, tmp_path / "warm")
    requests = [one for one in proxy.seen if reads_an_object(one.request)]
    large = [number for number, one in enumerate(requests) if one.sent_bytes > 30_000]
    proxy.schedule = nth(large[-1], Fault.FLIP_ANSWER, reads_an_object)
    with pytest.warns(ckpt.errors.WireWarning, match="were right when read again"):
        found = READERS[reader](url, options, tmp_path / "again")
    assert torch.equal(found["w"], state["w"])


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["convert", "load", slow("verify"), slow("diff")])
def test_a_record_that_several_calls_read_is_read_again_from_the_begin(
    place: Place,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.setenv("CKPT_MEMORY_BUDGET", str(8 << 20))
    monkeypatch.setattr("ckpt.checking.diff.BLOCK_BYTES", 2 << 20)
    state = {"w": torch.arange(2_500_000.0).reshape(2500, 1000)}
    ckpt.save(tmp_path / "ours", state)
    url, options = f"{place.url}/step-1.pt", proxy.server.options
    ckpt.convert(tmp_path / "ours", url, dst_storage_options=place.options)

    def read(folder: Path) -> Any:
        if way == "convert":
            ckpt.convert(url, folder, storage_options=options)
            return ckpt.read(folder)
        if way == "verify":
            assert ckpt.verify(url, storage_options=options).sound
            return state
        if way == "diff":
            assert ckpt.diff(url, tmp_path / "ours", storage_options=options).equal
            return state
        target = {"w": torch.zeros(2500, 1000, dtype=torch.float64)}
        return ckpt.load(url, target, dtype="target", storage_options=options)

    read(tmp_path / "warm")
    large = [one.sent_bytes >= 400_000 for one in proxy.seen if one.request.reads_data]
    assert sum(large) >= 2
    for number in [at for at, is_large in enumerate(large) if is_large][::4]:
        proxy.schedule = nth(number, Fault.FLIP_ANSWER, lambda request: request.reads_data)
        with pytest.warns(ckpt.errors.WireWarning):
            found = read(tmp_path / f"{number}")
        assert torch.equal(found["w"].float(), state["w"])


def test_a_byte_that_is_wrong_in_the_store_is_damage_without_a_word_on_the_network(
    place: Place, proxy: FaultProxy
) -> None:
    url = f"{place.url}/step-1"
    ckpt.save(url, states.whole(1), storage_options=place.options)
    with open_store(url, place.options) as store:
        [name] = [one for one in store.names() if one.endswith(".safetensors")]
        data = bytearray(store.read(name, 0, store.size(name)))
        data[len(data) // 2] ^= 1
        store.commit(name, bytes(data), replace=True)
    proxy.clear()
    with pytest.raises(ckpt.CorruptError, match="they were changed since; restore the file"):
        ckpt.read(url, storage_options=proxy.server.options)
    assert sum(one.request.reads_data for one in proxy.seen) <= 5


def test_what_is_denied_is_not_tried_again(
    clusters: Callable, place: Place, proxy: FaultProxy
) -> None:
    url = f"{place.url}/step-1"
    proxy.schedule = seeded(0, 1, [Fault.DENIED])
    for job in ("save", "load"):
        proxy.clear()
        outcome = tried(clusters, job, proxy, url, 1)
        assert outcome.error is not None
        assert "step-1" in outcome.error
        assert proxy.count() <= 10


@pytest.mark.thorough
def test_a_file_that_cannot_be_opened_is_asked_for_once_in_a_load(
    clusters: Callable, place: Place, proxy: FaultProxy
) -> None:
    url = f"{place.url}/step-1"
    clusters(2).run(states.save, url, place.options, 1, {})
    proxy.schedule = lambda one: Fault.DENIED if "safetensors" in one.target else None
    target = {"model": states.whole(2), "step": 0}
    with pytest.raises(ckpt.errors.AccessDeniedError, match=r"safetensors.*was denied"):
        ckpt.load(url, target, storage_options=proxy.server.options)
    asked = [one.request.target for one in proxy.seen if "safetensors" in one.request.target]
    assert len(asked) == len({*asked})
