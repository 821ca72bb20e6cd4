"""Connections between ranks, and what comes over them."""

import json
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sharding.agreement import coordinator as coordinator_module
from sharding.agreement import ranks as ranks_module
from sharding.agreement import rendezvous as rendezvous_module
from sharding.agreement.channel import (
    MOST_JSON_BYTES,
    MOST_TEXT_CHARS,
    PROTOCOL,
    Call,
    Failure,
    Kind,
    Link,
    Message,
    WaitWarning,
    flush,
    greeting,
)
from sharding.agreement.coordinator import MOST_STRANGERS, Coordinator, Participant, process_failure
from sharding.agreement.ranks import Ranks
from sharding.agreement.rendezvous import (
    LOOPBACK,
    PLACE,
    Rendezvous,
    _began,
    _machine,
    _own_hosts,
    _Place,
)
from sharding.errors import ENDED, ArgumentError, RankError

WAITING = WaitWarning(Call(1, "a call", 60.0, "a stage"), 1)


def everyone(ranks: Ranks, number: int) -> list[int]:
    """The small numbers that all ranks bring, by rank."""
    return list(ranks.merge_records("telling numbers", bytes([number]), b"".join))


def pair() -> tuple[Link, socket.socket]:
    """A link, and the other end of its connection."""
    with socket.create_server((LOOPBACK, 0)) as server:
        other = socket.create_connection(server.getsockname()[:2])
        return Link(server.accept()[0]), other


MESSAGES = st.builds(
    Message,
    st.sampled_from(Kind),
    st.integers(1, 1 << 40),
    st.integers(0, 99),
    st.text(),
    st.text(),
    st.floats(0, 1e6),
    st.none() | st.builds(Failure, st.text(), st.integers(0, 99), st.text(), st.text()),
    st.binary(),
)


@given(sent=st.lists(MESSAGES, min_size=1, max_size=4), cuts=st.lists(st.integers(0, 600)))
def test_messages_arrive_as_they_were_sent_however_they_are_cut(
    sent: list[Message], cuts: list[int]
) -> None:
    link, other = pair()
    data = b"".join(message.pack() for message in sent)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with other:
        for lo, hi in pairwise(places):
            other.sendall(data[lo:hi])
            link.receive()
    while not link.is_lost:
        link.wait(60)
    assert list(link.messages) == sent
    link.close()


def test_a_message_larger_than_a_connection_holds_is_sent_as_it_is_taken() -> None:
    one, other = pair()
    two = Link(other)
    large = Message(Kind.ANSWER, 1, data=os.urandom(1 << 24))
    one.send(large.pack())
    assert one.is_sending
    while not two.messages:
        flush([one], 0.01)
        two.receive()
    assert two.messages[0] == large
    assert not one.is_sending
    one.close()
    two.close()


def test_an_end_is_noticed_after_all_that_was_said_before_it() -> None:
    link, other = pair()
    said = Message(Kind.LEFT, 3, failure=Failure("writing", 1, "OSError", "no space"))
    other.sendall(said.pack())
    other.close()
    while not link.is_lost:
        link.wait(60)
    assert list(link.messages) == [said]
    link.send(said.pack())  # to nobody, which is no error
    link.close()


def framed(head: bytes) -> bytes:
    """The JSON of a message, with its length and without bytes behind it."""
    return struct.pack("!II", len(head), 0) + head


@pytest.mark.parametrize(
    "data",
    [
        framed(b"spam"),
        framed(b"[" * 100_000),
        framed(b'{"a":' * 100_000),
        framed(b'["here",1,1,"","",1.0,{}]'),
        framed(b'["here","1",1,"","",1.0,null]'),
        framed(b'["here",1,1,"","",1.0,["a",0,"b",[]]]'),
        framed(b'["hello",1,1,"","",1.0,null]'),
        struct.pack("!II", MOST_JSON_BYTES + 1, 0),
        struct.pack("!II", 2**32 - 1, 2**32 - 1),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_message_ends_the_connection(data: bytes) -> None:
    link, other = pair()
    with other:
        other.sendall(data)
        while not link.is_lost:
            link.wait(60)
    assert not link.messages
    link.close()


def test_a_failure_with_a_long_text_is_told_in_part() -> None:
    failure = Failure.of("writing", 1, OSError("\U0001f98a" * (MOST_TEXT_CHARS + 1234)))
    assert failure.message.endswith(" ... and 1,234 characters more")
    link, other = pair()
    with other:
        sending = Link(other)
        sending.send(Message(Kind.LEFT, 1, failure=failure).pack())
        while not link.messages:
            flush([sending], 0.01)
            link.receive()
    assert link.messages[0].failure == failure
    link.close()


def meet(ranks: Ranks) -> None:
    """Listen or connect, and no more."""
    with ranks.call("meeting"):
        pass


def with_strangers() -> tuple[list[int], list[bool]]:
    """Agree in a group at whose port strangers come first, and whether these were closed."""
    group = dist.new_group([0, 1])
    strangers = []
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_process_group_store(group)
        place = Rendezvous(store, "ckpt/calls")._place(monotonic() + 60, WAITING)
        assert place is not None
        real = greeting(place.secret, 1)
        another_version, another_rank = bytearray(real), greeting(place.secret, 2)
        another_version[5] ^= 1
        for text in (
            *(b"GET / HTTP/1.1\r\n\r\n" * 9, framed(b"[" * 100_000), b"\xff" * 100_000),
            *(struct.pack("!II", 3, 2**32 - 1) * 9, greeting("?" * 32, 1), another_rank),
            *(bytes(another_version), greeting(place.secret, 0), real[:-1], b""),
        ):
            strangers.append(socket.create_connection((LOOPBACK, place.port)))
            with suppress(ConnectionError):  # it may be closed before all has been sent
                strangers[-1].sendall(text)
    found = everyone(Ranks(group), dist.get_rank() + 5)
    return found, [is_closed(stranger) for stranger in strangers]


def is_closed(stranger: socket.socket) -> bool:
    """Whether the other end closes the connection without a word."""
    with stranger:
        stranger.settimeout(60)
        try:
            return stranger.recv(1) == b""
        except ConnectionError:
            return True


@contextmanager
def leading(world_size: int) -> Iterator[tuple[Coordinator, Rendezvous, tuple[str, int]]]:
    """Rank 0 in its first call, the rendezvous of the others, and rank 0's address."""
    store = dist.HashStore()
    leader = Coordinator(Rendezvous(store, "here"), world_size)
    with leader.call("meeting", 60):
        assert leader._listener is not None
        port = leader._listener.getsockname()[1]
        yield leader, Rendezvous(store, "here"), (LOOPBACK, port)
    leader.close()


def test_a_stranger_has_a_time_for_its_greeting_and_bytes_that_wait_are_read_first() -> None:
    with leading(3) as (leader, _, address), pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_module, "GREETING_SECONDS", 0.0)
        real = greeting(leader._rendezvous.secret, 2)
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            with socket.create_connection(address) as rank:
                slow.sendall(real[:-1])
                rank.sendall(real)
                while 2 not in leader._links or leader._strangers:
                    leader._news(60)
            assert is_closed(silent)
            assert is_closed(slow)


def test_more_strangers_take_the_place_of_the_oldest_and_a_rank_is_let_in() -> None:
    count = 3 * MOST_STRANGERS
    with leading(2) as (leader, others, address), ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(b"a")
            leader._news(0)
            assert len(leader._strangers) <= MOST_STRANGERS + 1
        link = others.connect(1, 60, WAITING)
        link.flush()
        while not leader._is_complete:
            leader._news(60)
        assert not leader._strangers
        link.close()


def test_a_rank_that_was_taken_for_a_stranger_connects_again() -> None:
    with leading(2) as (leader, others, _), ThreadPoolExecutor() as pool:
        follower = Participant(others, 1, 2)
        assert leader._call is not None
        assert leader._listener is not None
        with follower.call("meeting", 60) as call:
            leader._listener.accept()[0].close()  # as one of too many
            told = pool.submit(follower.meet, call, "meeting", b"1", None, b"".join)
            assert leader.meet(leader._call, "meeting", b"0", None, b"".join) == b"01"
            assert told.result() == b"01"
        follower.close()


@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_that_is_closed_unheard_hears_of_the_end_of_the_call_or_of_rank_0(
    has_left: bool,
) -> None:
    failure = Failure("meeting", 0, "OSError", "no space")
    with leading(2) as (leader, others, _):
        follower = Participant(others, 1, 2)
        assert leader._listener is not None
        with follower.call("meeting", 60) as call:
            if has_left:
                leader.close()
            else:
                leader._listener.accept()[0].close()
                leader._rendezvous.leave_failure(1, failure)
            told = follower.meet(call, "meeting", b"1", None, b"".join)
        assert told == (process_failure("meeting", 0) if has_left else failure)
        follower.close()


def test_rank_0_of_another_version_is_told_by_name() -> None:
    with leading(2) as (_, others, _):
        place = json.loads(others._store.get(PLACE))
        for changed in ({**place, "protocol": PROTOCOL + 1}, {"word": "x"}, []):
            others._store.set(PLACE, json.dumps(changed))
            with pytest.raises(ConnectionError, match="another version of ckpt"):
                others.connect(1, 60, WAITING)


@pytest.mark.parametrize(
    ("variables", "is_local"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, False),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "CKPT_HOST": "10.0.0.1"}, False),
        ({"CKPT_HOST": "127.0.0.1"}, True),
    ],
)
def test_rank_0_listens_at_the_loopback_alone_if_all_ranks_are_on_its_host(
    variables: dict[str, str], is_local: bool
) -> None:
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    launched = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), **variables}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "CKPT_HOST"):
            patch.delenv(name, raising=False)
        for name, value in launched.items():
            patch.setenv(name, value)
        leader = Coordinator(Rendezvous(dist.PrefixStore("a", store), "here"), 2)
        with leader.call("meeting", 60):
            assert leader._listener is not None
            assert (leader._listener.getsockname()[0] == LOOPBACK) is is_local
        with Rendezvous(dist.PrefixStore("a", store), "here").connect(1, 60, WAITING)._socket:
            leader.close()


def fork_and_agree() -> tuple[bool, list[int]]:
    """Agree after a fork: whether the child had no connection, and what all said."""
    ranks = Ranks()
    ranks.run_on_all("meeting", int)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            ranks.run_on_all("in the child", int)
        except RankError:
            os.write(write, b"none")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        return answer.read() == b"none", everyone(ranks, dist.get_rank())


def test_a_forked_child_has_no_connection_and_takes_none_away(clusters: Callable) -> None:
    assert clusters(2).run(fork_and_agree) == [(True, [0, 1])] * 2


def use_a_group_without_a_store() -> None:
    """Ask for the ranks of a group that is as torch's backend mpi makes it."""
    group = dist.new_group()
    world = dist.distributed_c10d._world
    world.pg_map[group] = (world.pg_map[group][0], None)  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"has no store.*gloo or nccl"):
        Ranks(group)


def test_a_group_without_a_store_is_refused(clusters: Callable) -> None:
    clusters(2).run(use_a_group_without_a_store)


def fail_in_three_ways() -> tuple[list[str], list[int]]:
    """What a rank of three hears of calls that fail, and what all say in the call after them."""
    rank, ranks, said = dist.get_rank(), Ranks(seconds=20), []

    def fail() -> None:
        if rank:
            raise ValueError(f"of rank {rank}")

    def leave() -> None:
        with ranks.call("leaving"):
            fail()
            ranks.run_on_all("going on", int)

    with pytest.raises((RankError, ValueError)) as raised:
        ranks.run_on_all("failing", fail)
    said.append(str(raised.value))
    with pytest.raises(RankError) as raised:
        ranks.run_on_all("loading" if rank == 2 else "saving", int)
    said.append(str(raised.value))
    for _ in range(2 if rank else 0):  # before rank 0 comes
        with pytest.raises(ValueError, match="of rank"):
            leave()
    dist.barrier()
    for _ in range(0 if rank else 2):
        with pytest.raises(RankError) as raised:
            leave()
        said.append(str(raised.value))
    return said, everyone(ranks, rank)


def test_the_lowest_rank_that_failed_and_the_calls_of_all_are_told(clusters: Callable) -> None:
    first, *others = clusters(3).run(fail_in_three_ways)
    other_call = (
        "saving failed on rank 2 with OutOfStep: it is in loading (loading), and rank 0 in saving "
        "(saving): call the same on all ranks, in the same order"
    )
    failing, leaving = (
        f"{stage} failed on rank 1 with ValueError: of rank 1" for stage in ("failing", "leaving")
    )
    assert first == ([failing, other_call, leaving, leaving], [0, 1, 2])
    assert others == [([f"of rank {rank}", other_call], [0, 1, 2]) for rank in (1, 2)]


def call_and_fail(outcomes: Sequence[Sequence[str]], delays: Sequence[Sequence[int]]) -> list[str]:
    """What a rank hears of calls that fail before or after an exchange, however fast others are."""
    rank, ranks, heard = dist.get_rank(), Ranks(seconds=20, purpose="in turn"), list[str]()
    for at, (by_rank, turns) in enumerate(zip(outcomes, delays, strict=True)):
        for _ in range(turns[rank]):
            os.sched_yield()
        try:
            with ranks.call("working", Ranks(seconds=20, purpose="in turn, later")):
                if by_rank[rank] == "before":
                    raise ValueError(f"call {at}")
                assert ranks.broadcast(bytes([at])) == bytes([at])
                if by_rank[rank] == "after":
                    raise ValueError(f"call {at}")
                ranks.run_on_all("ending", int)
        except (RankError, ValueError) as error:
            heard.append(str(error).rpartition("call ")[2])
        else:
            heard.append("well")
    return heard


OUTCOMES = st.lists(
    st.tuples(*[st.sampled_from(["well", "well", "before", "after"])] * 3), min_size=1, max_size=6
)


@given(outcomes=OUTCOMES, turns=st.lists(st.sampled_from([0, 1, 300]), min_size=18, max_size=18))
def test_the_same_calls_fail_on_all_ranks_whichever_fail_and_whoever_is_ahead(
    clusters: Callable, outcomes: list[tuple[str, ...]], turns: list[int]
) -> None:
    delays = [turns[3 * at : 3 * at + 3] for at in range(len(outcomes))]
    told = ["well" if {*row} == {"well"} else str(at) for at, row in enumerate(outcomes)]
    assert clusters(3).run(call_and_fail, outcomes, delays) == [told] * 3


def join_with_an_error() -> tuple[str, str, list[int]]:
    """The error of each rank if rank 0 cannot join the records, and a later answer."""
    ranks = Ranks(seconds=20, purpose="joining")

    def join(records: Sequence[bytes]) -> bytes:
        raise FileNotFoundError(f"{len(records)} records")

    with pytest.raises((FileNotFoundError, RankError)) as raised:
        ranks.merge_records("joining", b"", join)
    return type(raised.value).__name__, str(raised.value), everyone(ranks, dist.get_rank())


def test_an_error_of_joining_is_rank_0_s_own_error_and_a_rank_error_elsewhere(
    clusters: Callable,
) -> None:
    first, *others = clusters(3).run(join_with_an_error)
    assert first == ("FileNotFoundError", "3 records", [0, 1, 2])
    said = "joining failed on rank 0 with FileNotFoundError: 3 records"
    assert others == [("RankError", said, [0, 1, 2])] * 2


def close_on_rank_2() -> str:
    """The error of the others after rank 2's connection has ended without a word."""
    ranks = Ranks(seconds=20, purpose="ending")
    ranks.run_on_all("meeting", int)
    if dist.get_rank() == 2:
        ranks._channel.close()
        return ""
    with pytest.raises(RankError) as raised:
        ranks.run_on_all("going on", int)
    return f"rank {raised.value.rank}: {raised.value.error}"


def test_the_end_of_a_rank_is_noticed_before_the_time_is_over(clusters: Callable) -> None:
    assert clusters(3).run(close_on_rank_2) == [f"rank 2: {ENDED}"] * 2 + [""]


def meet_at_tcp_store(port: int) -> list[int]:
    """Agree in a group that has met at a TCPStore of its own."""
    rank = dist.get_rank()
    store = dist.TCPStore(LOOPBACK, port, 2, is_master=rank == 0)
    channel = (
        ranks_module.Coordinator(Rendezvous(store, "here"), 2)
        if rank == 0
        else ranks_module.Participant(Rendezvous(store, "here"), rank, 2)
    )
    ranks = Ranks()
    ranks._channel = channel
    found = everyone(ranks, rank + 1)
    dist.barrier()
    return found


def test_ranks_meet_at_a_tcp_store(clusters: Callable) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    assert clusters(2).run(meet_at_tcp_store, port) == [[1, 2], [1, 2]]


def test_strangers_are_not_listened_to(clusters: Callable) -> None:
    assert clusters(2).run(with_strangers) == [([5, 6], []), ([5, 6], [True] * 10)]


def agree_with_too_many_files() -> tuple[str, list[int]]:
    """What is said where rank 0 may open no more files, and what is found when it may again.

    Rank 1 has connected and cannot be let in; rank 2 comes when all is over.
    """
    group = dist.new_group()
    rank, ranks, before = dist.get_rank(), Ranks(group, seconds=60), None
    store = dist.PrefixStore("files", dist.distributed_c10d._get_default_store())
    if rank == 2:
        store.wait(["over"])
        with pytest.raises(RankError, match="more files"):  # no earlier call can be any more
            meet(ranks)
    else:
        meet(ranks)  # rank 0 listens
    if rank == 0:
        store.wait(["connected"])
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open(os.devnull) as last:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), before[1]))
    elif rank == 1:
        store.set("connected", "")
    with pytest.raises(RankError) as raised:
        everyone(ranks, rank)
    if before is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        store.set("over", "")
    return str(raised.value), everyone(ranks, rank)


def test_rank_0_may_open_no_more_files_and_all_are_told(clusters: Callable) -> None:
    for said, found in clusters(3).run(agree_with_too_many_files):
        assert "failed on rank 0 with OSError: it may open no more files" in said
        assert "ulimit -n" in said
        assert found == [0, 1, 2]


def fork_before_meeting() -> tuple[bytes, list[int]]:
    """What a child says that was forked when rank 0 listened and nobody had connected."""
    group = dist.new_group()
    rank, ranks = dist.get_rank(), Ranks(group)
    if rank == 0:
        meet(ranks)
    read, write = os.pipe()
    child = os.fork() if rank == 0 else -1
    if not child:
        try:
            everyone(ranks, rank)
        except RankError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read()
    if rank == 0:
        os.waitpid(child, 0)
    dist.barrier()
    if rank:
        meet(ranks)
    return said, everyone(ranks, rank)


def test_a_child_forked_before_the_first_meeting_is_told_so(clusters: Callable) -> None:
    (said, found), (_, other) = clusters(2).run(fork_before_meeting)
    assert b"it was forked from it" in said
    assert found == other == [0, 1]


def test_what_looks_like_one_machine_and_is_two_meets_at_the_other_address() -> None:
    store = dist.HashStore()
    leader, follower = Rendezvous(store, "here"), Rendezvous(store, "here")
    with socket.create_server(("127.0.0.2", 0)) as server:  # not at the loopback address
        place = _Place(
            PROTOCOL, leader.secret, _machine(), ["127.0.0.2"], server.getsockname()[1], False, 0.0
        )
        follower._store.set(PLACE, json.dumps(asdict(place)))
        follower.connect(1, 60, WAITING).close()


def test_an_address_that_cannot_be_reached_from_here_is_not_rank_0_s() -> None:
    def resolved(*arguments: object, **options: object) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("fe80::1", 9, 0, 99999)),  # nowhere
            *found("127.0.0.1", 9, type=socket.SOCK_DGRAM),
        ]

    found = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolved)
        assert _own_hosts("a host") == ([], True)


class Kept(dist.Store):
    """A store that says something else each time it is asked."""

    def __init__(self, said: list[_Place]) -> None:
        super().__init__()
        self.said = [json.dumps(asdict(place)).encode() for place in said]

    def clone(self) -> dist.Store:
        return self

    def wait(self, *_: object) -> None: ...

    def get(self, _: str) -> bytes:
        return self.said.pop(0)


def test_a_place_of_before_this_process_is_no_reason_to_give_up() -> None:
    with socket.create_server((LOOPBACK, 0)) as server, socket.socket() as dead:
        dead.bind((LOOPBACK, 0))  # and does not listen
        here = _Place(PROTOCOL, "new", _machine(), [], server.getsockname()[1], False, time.time())
        old = replace(here, secret="old", port=dead.getsockname()[1], at=_began() - 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous_module, "REFUSED_SECONDS", -1.0)
            rendezvous = Rendezvous(Kept([old, old, here]), "here")
            rendezvous.connect(1, 60, WAITING).close()
            assert rendezvous.secret == "new"
            with pytest.raises(ConnectionError, match="cannot be reached"):
                Rendezvous(Kept([replace(old, at=time.time())]), "here").connect(1, 60, WAITING)
            local = replace(old, at=time.time(), machine="another", hosts=[LOOPBACK])
            with pytest.raises(ConnectionError, match="equal LOCAL_WORLD_SIZE and WORLD_SIZE"):
                Rendezvous(Kept([local]), "here").connect(1, 60, WAITING)


def test_when_this_process_began_is_known() -> None:
    assert time.time() - 86400 < _began() <= time.time()


def leave_an_address() -> tuple[list[bool], list[int]]:
    """Whether rank 0's address is at the store before and after it left, and who meets then."""
    rank = dist.get_rank()
    store = dist.PrefixStore("leave", dist.distributed_c10d._get_default_store())
    is_there = []
    if rank == 0:
        leader = ranks_module.Coordinator(Rendezvous(store, "here"), 2)
        with leader.call("alone", 60):
            is_there.append(store.check(["here/ckpt/place"]))
        del leader
        is_there.append(store.check(["here/ckpt/place"]))
    dist.barrier()  # else rank 1 may connect to one that leaves
    ranks = Ranks()
    ranks._channel = (
        ranks_module.Participant(Rendezvous(store, "here"), rank, 2)
        if rank
        else ranks_module.Coordinator(Rendezvous(store, "here"), 2)
    )
    return is_there, everyone(ranks, rank)


def test_who_leaves_a_group_takes_its_address_along(clusters: Callable) -> None:
    first, second = clusters(2).run(leave_an_address)
    assert first == ([True, False], [0, 1])
    assert second == ([], [0, 1])


def meet_again_at_one_store() -> tuple[str, list[int], bool]:
    """Two groups, one after another at one store: how the first ends, and what the second has."""
    rank = dist.get_rank()
    store = dist.PrefixStore("meet-again", dist.distributed_c10d._get_default_store())

    def made() -> tuple[ranks_module.Coordinator | ranks_module.Participant, Ranks]:
        rendezvous = Rendezvous(store, "here")
        ranks = Ranks(seconds=30)
        kind = ranks_module.Participant(rendezvous, rank, 2) if rank else None
        ranks._channel = kind or ranks_module.Coordinator(rendezvous, 2)
        return ranks._channel, ranks

    channel, ranks = made()
    if rank:
        dist.barrier()
    with pytest.raises((RankError, ZeroDivisionError)) as raised:
        ranks.run_on_all("failing", lambda: 1 // rank)
    if not rank:
        dist.barrier()  # before anybody has connected
    dist.barrier()
    channel.close()
    channel, ranks = made()
    if rank:
        dist.barrier()  # the new address is there
    with ranks.call("once more"):
        if not rank:
            dist.barrier()
        found = everyone(ranks, rank)
    dist.barrier()
    channel.close()
    return type(raised.value).__name__, found, store.check(["here/ckpt/place"])


@pytest.mark.thorough
def test_a_group_made_again_at_one_store_finds_nothing_of_the_earlier(clusters: Callable) -> None:
    first, second = clusters(2).run(meet_again_at_one_store)
    assert first == ("ZeroDivisionError", [0, 1], False)
    assert second == ("RankError", [0, 1], False)
