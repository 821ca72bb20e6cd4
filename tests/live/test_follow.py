"""`ckpt.follow` yields the newest versions, in order, the same on all ranks."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.loading import agreement
from tests.garbage import collect_garbage
from tests.live.offered import RUNTIME, Offer, offered

pytestmark = pytest.mark.thorough


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
    with pytest.raises(ckpt.WaitTimeoutError, match="no version after 1"):
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


def test_checkpoints_of_a_run_come_in_the_order_of_their_commits(tmp_path: Path) -> None:
    """A run that goes back to an earlier step, and a folder that is not there at first."""
    place, state = tmp_path / "run", {"w": torch.zeros(2)}
    versions = ckpt.follow(place, timeout=60, look_seconds=0.01)
    found: list[int] = []

    def take() -> None:
        version = next(versions)
        assert ckpt.load(version.url, {"w": torch.ones(2)})["w"].tolist() == [version.number] * 2
        found.append(version.number)

    first = Thread(target=take)
    first.start()
    with ckpt.Checkpointer(place, every_steps=1) as run:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            run.save(step, state)
            run.wait_until_finished()
            if step == 1:
                first.join()
    take()  # step 2 is left out
    with ckpt.Checkpointer(place, every_steps=1) as run:
        run.restore(state, step=1)
        state["w"].fill_(2)
        run.save(2, state)
        run.wait_until_finished()
        take()
        with pytest.raises(ckpt.WaitTimeoutError, match="after 2"):
            next(ckpt.follow(place, after=2, timeout=0.1, look_seconds=0.01))
    assert found == [1, 3, 2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.zeros(4))


def double(module: nn.Module, keys: object) -> None:
    with torch.no_grad():
        module.scale.mul_(2)  # type: ignore[operator, union-attr]


Change = Callable[[Model, dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "another parameter": lambda model, _: setattr(model, "scale", nn.Parameter(torch.zeros(4))),
    "another memory": lambda model, _: setattr(model.scale, "data", torch.zeros(4)),
    "another shape": lambda model, _: setattr(model, "scale", nn.Parameter(torch.zeros(6))),
    "a module more": lambda model, _: model.inner.append(nn.Linear(2, 2)),
    "a buffer less": lambda model, _: model.inner[1]._non_persistent_buffers_set.add("running_var"),
    "a tied parameter": lambda model, _: setattr(model.inner[1], "weight", model.inner[0].bias),
    "a tensor more": lambda _, target: target.update(beside=torch.zeros(3)),
    "a value more": lambda _, target: target.update(step=0),
    "a hook": lambda model, _: model.register_load_state_dict_post_hook(double),
}


def test_a_match_that_is_kept_for_the_next_version_fits_each_change_of_both_sides(
    offer: Offer, tmp_path: Path
) -> None:
    versions, numbers = ckpt.follow(offer.url, timeout=60), itertools.count(2)
    next(versions)

    def load_next(target: dict[str, Any]) -> None:
        """Publishes random numbers with the names of the target, and compares."""
        saved, number = copy.deepcopy(target), next(numbers)
        for name, tensor in saved["model"].state_dict(keep_vars=True).items():
            tensor.data = torch.full_like(tensor, number + len(name))
        saved.update({key: value + 1 for key, value in target.items() if key != "model"})
        ckpt.save(tmp_path / f"v{number}", saved)
        offer.publish(number, tmp_path / f"v{number}")
        ckpt.load(next(versions).url, target)
        if target["model"]._load_state_dict_post_hooks:
            double(saved["model"], None)
        wanted = {**saved["model"].state_dict(), **saved}
        for name, found in {**target["model"].state_dict(), **target}.items():
            if name != "model":
                assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted[name])), name

    for change in CHANGES.values():
        target: dict[str, Any] = {"model": Model()}
        with patch.object(agreement, "match", side_effect=agreement.match) as matched:
            for _ in range(3):
                load_next(target)
            assert matched.call_count == 1
            change(target["model"], target)
            for _ in range(2):
                load_next(target)
            assert matched.call_count > 1


def test_names_that_only_a_new_version_has_or_lacks_are_an_error_for_a_follower_too(
    offer: Offer, tmp_path: Path
) -> None:
    target = {"w": torch.zeros(6), "b": torch.zeros(2)}
    versions = ckpt.follow(offer.url, timeout=60)
    next(versions)
    wrong = {"w": torch.ones(6)}, {**target, "c": torch.ones(1)}, {**target, "b": torch.ones(3)}
    for number, saved in enumerate((target, target, *wrong), start=2):
        ckpt.save(tmp_path / f"v{number}", saved)
        offer.publish(number, tmp_path / f"v{number}")
        with pytest.raises(ckpt.MismatchError) if number > 3 else nullcontext():
            ckpt.load(next(versions).url, target)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_follower_loads_into_a_compiled_script_each_time(offer: Offer, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    script = torch.jit.script(nn.Linear(3, 2))
    versions = ckpt.follow(offer.url, timeout=60)
    next(versions)
    for number in (2, 3):
        nn.init.constant_(model.weight, number)
        ckpt.save(tmp_path / f"v{number}", {"model": model})
        offer.publish(number, tmp_path / f"v{number}")
        ckpt.load(next(versions).url, {"model": script})
        assert torch.equal(script.weight, model.weight)


def test_a_follower_keeps_no_model_alive_and_loads_from_other_places_too(
    offer: Offer, folder: Path
) -> None:
    versions = ckpt.follow(offer.url, timeout=60)
    target = {"w": torch.zeros(6)}
    ckpt.load(next(versions).url, target)
    memory = ref(target["w"])
    target.clear()
    collect_garbage()
    assert memory() is None
    for place in (offer.url, folder):
        again = {"w": torch.zeros(6)}
        ckpt.load(place, again)
        assert torch.equal(again["w"], torch.arange(6.0))


def test_the_address_of_one_checkpoint_is_an_error(folder: Path) -> None:
    with pytest.raises(ckpt.ArgumentError, match=r"is a checkpoint: give ckpt\.follow the folder"):
        next(ckpt.follow(folder, timeout=1))


def test_a_run_whose_newest_checkpoint_was_removed_has_nothing_newer(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every_steps=1) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.ones(2)})
        run.wait_until_finished()
        versions = ckpt.follow(tmp_path, timeout=0.1, look_seconds=0.01)
        assert next(versions).number == 2
        run.delete(2)
        with pytest.raises(ckpt.WaitTimeoutError):
            next(versions)
