"""Connections between ranks, and what comes over them."""

import os
import socket
from collections.abc import Callable
from itertools import pairwise
from time import monotonic

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sharding.agreement import ranks as ranks_module
from sharding.agreement.gathering import Gathering
from sharding.agreement.links import Failure, Kind, Link, Message, flush
from sharding.agreement.meeting import LOOPBACK, Meeting
from sharding.agreement.ranks import Ranks
from sharding.errors import RankError


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
    data = b"".join(message.packed() for message in sent)
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
    one.send(large.packed())
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
    other.sendall(said.packed())
    other.close()
    while not link.is_lost:
        link.wait(60)
    assert list(link.messages) == [said]
    link.send(said.packed())  # to nobody, which is no error
    link.close()


def test_what_is_no_message_ends_the_connection() -> None:
    link, other = pair()
    with other:
        other.sendall(b"\0\0\0\4\0\0\0\0spam")
        while not link.is_lost:
            link.wait(60)
    assert not link.messages
    link.close()


def with_strangers() -> list[int]:
    """Agree in a group at whose port strangers come first."""
    group = dist.new_group([0, 1])
    strangers = []
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_process_group_store(group)
        place = Meeting(store, "ckpt/calls")._place(monotonic() + 60)
        assert place is not None
        guess = Message(Kind.HELLO, 0, 1, "a guess").packed()
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4\0\0\0\0spam", guess, b""):
            strangers.append(socket.create_connection((LOOPBACK, place.port)))
            strangers[-1].sendall(text)
    found = Ranks(group).all_hashes(dist.get_rank() + 5)
    for stranger in strangers:
        stranger.close()
    return found


def fork_and_agree() -> tuple[bool, list[int]]:
    """Agree after a fork: whether the child had no connection, and what all said."""
    ranks = Ranks()
    ranks.attempt("meeting", int)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            ranks.attempt("in the child", int)
        except RankError:
            os.write(write, b"none")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        return answer.read() == b"none", ranks.all_hashes(dist.get_rank())


def test_a_forked_child_has_no_connection_and_takes_none_away(clusters: Callable) -> None:
    assert clusters(2).run(fork_and_agree) == [(True, [0, 1])] * 2


def gather_by_collectives() -> tuple[list[int], bytes, str, str]:
    """What ranks tell one another where they have no store."""
    rank = dist.get_rank()
    ranks = Ranks()
    ranks._channel = Gathering(None, rank, dist.get_world_size())
    assert not ranks.from_any_thread
    assert ranks.agree("comparing", None, (rank, 7), 10 + rank).same == (False, True)

    def fail() -> None:
        if rank == 1:
            raise ValueError("on purpose")

    with pytest.raises((RankError, ValueError)) as raised:
        ranks.attempt("failing", fail)
    again = Ranks()
    again._channel = Gathering(None, rank, dist.get_world_size())
    told = again.broadcast(b"from 1" if rank == 1 else b"", 1)
    return again.all_hashes(rank), told, type(raised.value).__name__, str(raised.value)


def test_where_there_is_no_store_ranks_agree_by_collectives(clusters: Callable) -> None:
    first, second = clusters(2).run(gather_by_collectives)
    said = "failing failed on rank 1 with ValueError: on purpose"
    assert first == ([0, 1], b"from 1", "RankError", said)
    assert second == ([0, 1], b"from 1", "ValueError", "on purpose")


def meet_at_tcp_store(port: int) -> list[int]:
    """Agree in a group that has met at a TCPStore of its own."""
    rank = dist.get_rank()
    store = dist.TCPStore(LOOPBACK, port, 2, is_master=rank == 0)
    channel = (
        ranks_module.Leader(Meeting(store, "here"), 2)
        if rank == 0
        else ranks_module.Follower(Meeting(store, "here"), rank, 2)
    )
    ranks = Ranks()
    ranks._channel = channel
    found = ranks.all_hashes(rank + 1)
    dist.barrier()
    return found


def test_ranks_meet_at_a_tcp_store(clusters: Callable) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    assert clusters(2).run(meet_at_tcp_store, port) == [[1, 2], [1, 2]]


def test_strangers_are_not_listened_to(clusters: Callable) -> None:
    assert clusters(2).run(with_strangers) == [[5, 6], [5, 6]]


def meet_again_at_one_store() -> tuple[str, list[int], bool]:
    """Two groups, one after another at one store: how the first ends, and what the second has."""
    rank = dist.get_rank()
    store = dist.PrefixStore("meet-again", dist.distributed_c10d._get_default_store())

    def made() -> tuple[ranks_module.Leader | ranks_module.Follower, Ranks]:
        meeting = Meeting(store, "here")
        ranks = Ranks(seconds=30)
        kind = ranks_module.Follower(meeting, rank, 2) if rank else None
        ranks._channel = kind or ranks_module.Leader(meeting, 2)
        return ranks._channel, ranks

    channel, ranks = made()
    if rank:
        dist.barrier()
    with pytest.raises((RankError, ZeroDivisionError)) as raised:
        ranks.attempt("failing", lambda: 1 // rank)
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
        found = ranks.all_hashes(rank)
    dist.barrier()
    channel.close()
    return type(raised.value).__name__, found, store.check(["here/ckpt/place"])


def test_a_group_made_again_at_one_store_finds_nothing_of_the_earlier(clusters: Callable) -> None:
    first, second = clusters(2).run(meet_again_at_one_store)
    assert first == ("ZeroDivisionError", [0, 1], False)
    assert second == ("RankError", [0, 1], False)
