"""`ckpt.follow` yields the newest versions, in order, the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from tests.live.offered import RUNTIME, Offer, offered


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The folder of the servers' sockets."""
    with pytest.MonkeyPatch.context() as patch:
        found = tmp_path_factory.mktemp("sockets")
        found.chmod(0o700)
        patch.setenv(RUNTIME, str(found))
        yield str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "c", {"w": torch.arange(6.0)})
    return tmp_path / "c"


@pytest.fixture
def offer(folder: Path, sockets: str) -> Iterator[Offer]:
    """A live state with version 1."""
    with offered(folder, name="followed") as one:
        yield one


def test_the_first_version_is_the_newest_one(offer: Offer, folder: Path) -> None:
    offer.publish(4, folder)
    version = next(ckpt.follow(offer.url))
    assert (version.number, version.url) == (4, offer.at(4))
    assert offer.token not in repr(version)
    assert torch.equal(ckpt.load(version.url, {"w": torch.zeros(6)})["w"], torch.arange(6.0))


def test_a_version_that_comes_later_ends_the_wait(offer: Offer, folder: Path) -> None:
    versions = ckpt.follow(offer.url, timeout=60)
    found = [next(versions).number]
    for number in (2, 5):
        later = Thread(target=offer.publish, args=(number, folder))
        later.start()
        found.append(next(versions).number)
        later.join()
    assert found == [1, 2, 5]


def test_versions_that_were_replaced_meanwhile_are_left_out(offer: Offer, folder: Path) -> None:
    versions = ckpt.follow(offer.url)
    assert next(versions).number == 1
    for number in (2, 3, 4):
        offer.publish(number, folder)
    assert next(versions).number == 4


def test_no_newer_version_in_time_is_an_error(offer: Offer) -> None:
    with pytest.raises(ckpt.WaitTimeoutError, match="no version above 1"):
        next(ckpt.follow(offer.url, after=1, timeout=0.2))
    with pytest.raises(ckpt.WaitTimeoutError):
        next(ckpt.follow(offer.url, after=1, timeout=0))
    for after in (0, -1):
        assert next(ckpt.follow(offer.url, after=after, timeout=0)).number == 1


def test_the_end_of_the_publisher_ends_the_wait(folder: Path, sockets: str) -> None:
    with offered(folder, name="ends") as one:
        versions = ckpt.follow(one.url, timeout=60)
        assert next(versions).number == 1
        ending = Thread(target=one.server.remove)
        ending.start()
        with pytest.raises((ckpt.NotACheckpointError, ckpt.UnreachableError)):
            next(versions)
        ending.join()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("live://host:4000/policy/3", {}, "without a version"),
        ("runs/step-1", {}, "not the address of a live state"),
        ("live://host:4000/policy", {"timeout": -1.0}, "timeout is -1.0"),
        ("live://host:4000/policy", {"timeout": float("nan")}, "timeout is nan"),
        ("live://host:4000/policy", {"timeout": "5"}, "timeout is '5'"),
        ("live://host:4000/policy", {"after": 1.5}, "after is 1.5"),
        ("live://host:4000/policy", {"after": -2}, "after is -2"),
    ],
)
def test_wrong_arguments_are_errors_of_the_call(
    url: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ckpt.ArgumentError, match=message):
        ckpt.follow(url, **options)


def followed(url: str, sockets: str, begun: str) -> list[tuple[int, float]]:
    """On each rank: two versions, and the values that loads bring. Rank 0 tells of the first."""
    os.environ[RUNTIME] = sockets
    found = []
    for version in ckpt.follow(url, timeout=60):
        found.append((version.number, float(ckpt.load(url, {"w": torch.zeros(6)})["w"][1])))
        if len(found) == 2:
            break
        if dist.get_rank() == 0:
            Path(begun).write_text("begun")
    return found


def test_all_ranks_follow_the_same_versions(
    clusters: Callable[[int], Any], offer: Offer, folder: Path, sockets: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    def publish() -> None:
        begun.read_text()
        for number in range(2, 6):
            offer.publish(number, folder)

    later = Thread(target=publish, daemon=True)
    later.start()
    found = clusters(3).run(followed, offer.url, sockets, str(begun))
    later.join(60)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == (1, 1.0)
    assert found[0][1] in [(number, 1.0) for number in range(2, 6)]


def one_token(url: str, sockets: str, timeout: float) -> str:
    """On each rank: the error of following with a token that only rank 0 has wrong."""
    os.environ[RUNTIME] = sockets
    try:
        next(ckpt.follow(url, timeout=timeout))
    except ckpt.CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_rank_0_is_one_of_all_ranks(
    clusters: Callable[[int], Any], offer: Offer, sockets: str
) -> None:
    wrong = offer.url.replace(offer.token, "wrong")
    first, second = clusters(2).run(one_token, wrong, sockets, 60.0)
    assert first.startswith("AccessDeniedError")
    assert second.startswith("RankError")
    assert "AccessDeniedError" in second
