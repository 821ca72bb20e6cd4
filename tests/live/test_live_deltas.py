"""A reader that has the version before gets the differences, in whatever layout it has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.live.store import LiveStore
from ckpt.transfer import live_deltas
from ckpt.transfer.live_deltas import Area, Delta, areas_in, make_delta
from formats.errors import FormatError
from tests.live.layouts import spread
from tests.live.offered import RUNTIME

SECONDS = 60
ROWS, COLUMNS = 301, 1024
"""More elements than a chunk has, and rows that do not divide evenly."""
LARGE = 1 << 15
"""Elements that are more than a piece of `PIECE_BYTES`, but of the smallest width."""
PIECE_BYTES = 40_000


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Elements before and after, as views of larger arrays of equal shape."""
    width = draw(st.sampled_from((1, 2, 4, 8)))
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    if draw(st.booleans()):
        shape.append(draw(st.sampled_from((LARGE // 2 + 1, LARGE, LARGE + 1, 2 * LARGE + 3))))
    if prod(shape) > 4 * LARGE:
        shape = shape[-1:]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    margins = [draw(st.integers(0, 2)) for _ in shape]
    whole = [size + margin for size, margin in zip(shape, margins, strict=True)]
    nbytes, odd = prod(whole) * width, draw(st.sampled_from((0, width)))
    old = random.integers(0, 256, odd + nbytes, "u1")[odd:].view(f"<u{width}").reshape(whole)
    new = old.copy()
    part = draw(st.sampled_from((0.0, 0.001, 0.05, 0.1, 0.3, 1.0)))
    change = np.array(draw(st.integers(1, 255)), new.dtype)
    new[random.random(whole) < part] ^= change
    if draw(st.booleans()):  # some pieces have many changes, and others few
        new.reshape(-1)[new.size // 3 : new.size // 3 + LARGE] ^= change
    inside = [slice(margin, None) for margin in margins]
    if draw(st.booleans()):  # one column of it
        inside[-1:] = [slice(-1, None)] * bool(inside)
    return old[(*inside, ...)], new[(*inside, ...)]


def area_of(array: np.ndarray[Any, Any], has_sums: bool = True) -> Area:
    return Area(0, array.itemsize, array.shape, array.strides, has_sums)


@given(st.lists(boxes(), max_size=3), st.booleans())
def test_a_delta_makes_the_new_elements_of_the_old_ones_in_any_place(
    pairs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]], has_sums: bool
) -> None:
    areas = [area_of(old, has_sums) for old, _ in pairs]
    assert areas_in([area.as_json() for area in areas]) == areas
    with patch.object(live_deltas, "PIECE_BYTES", PIECE_BYTES):
        data = make_delta(areas, [old for old, _ in pairs], [new for _, new in pairs])
        delta = Delta(data, areas)
        for area, (old, new) in zip(areas, pairs, strict=True):
            target = old.copy(order="F")  # as it lies nowhere else
            assert delta.apply(area, target)
            assert np.array_equal(target, new)


def test_the_sums_tell_a_target_that_has_another_version() -> None:
    old = np.arange(3 * LARGE, dtype="<u4")
    new, other = old.copy(), old.copy()
    new[7] += 1
    other[-1] += 1
    area = area_of(old)
    delta = make_delta([area], [old], [new])
    assert len(delta) < 200
    assert not Delta(delta, [area]).apply(area, other)


@given(st.binary(max_size=60), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_damaged_delta_is_an_error_or_told_by_the_sums(noise: bytes, at: int, cut: int) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, (7, 20_000), "u1").view("<u2")
    new = np.where(random.random(old.shape) < 0.02, old + 1, old)
    area = area_of(old)
    data = bytearray(make_delta([area], [old], [new]))
    data[at % len(data) : at % len(data) + len(noise)] = noise
    room = np.zeros((9, old.shape[1]), old.dtype)
    target = room[1:8]
    target[...] = old
    with suppress(FormatError):
        is_right = Delta(bytes(data[: len(data) - cut % 50]), [area]).apply(area, target)
        assert is_right == np.array_equal(target, new)
    assert not room[0].any()
    assert not room[8].any()


@pytest.mark.parametrize(
    "wanted",
    [
        7,
        [[0, 2, [3], [2]]],
        [[0, 2, [3], [2], 1]],
        [[-1, 2, [3], [2], True]],
        [[0, 3, [3], [3], True]],
        [[0, 2, [0], [2], True]],
        [[0, 2, [3, 4], [2], True]],
        [[0, 1, [1 << 30], [0], True]],
        [[0, 1, [1], [1], True]] * (live_deltas.MOST_AREAS + 1),
    ],
)
def test_a_request_for_no_area_or_too_much_is_refused(wanted: object) -> None:
    with pytest.raises(FormatError):
        areas_in(wanted)


def whole(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: a few elements of each differ from those of the one before."""
    random = torch.Generator().manual_seed(5)
    state = {
        "matrix": torch.randn(ROWS, COLUMNS, generator=random).bfloat16(),
        "moments": torch.randn(ROWS, COLUMNS, generator=random),
        "cube": torch.randn(3, 64, 700, generator=random),
        "bias": torch.randn(ROWS, generator=random),
        "fixed": torch.randn(64, 64, generator=random),
        "count": torch.tensor(0),
    }
    for number in range(1, version + 1):
        state["count"] += 1
        for name in ("matrix", "moments", "cube", "bias"):
            flat = state[name].reshape(-1)
            places = torch.randperm(len(flat), generator=random)[: max(1, len(flat) // 100)]
            flat[places] += number
    return state


_live: dict[str, ckpt.LiveState] = {}
_states: dict[str, dict[str, Any]] = {}


def begin(runtime: str, name: str) -> str:
    os.environ[RUNTIME] = runtime
    _states[name] = spread(whole(0), 0)
    _live[name] = ckpt.publish(_states[name], name)
    return _live[name].url


def update(name: str, version: int) -> None:
    for key, tensor in spread(whole(version), 0).items():
        _states[name][key].to_local().copy_(tensor.to_local())
    _live[name].update().wait(SECONDS)


def end(name: str) -> None:
    _live.pop(name).close()


def load(url: str, runtime: str, dim: int | None, version: int, had: int | None) -> float:
    """Loads a version beside a target of another one; returns the part of the bytes that came."""
    os.environ[RUNTIME] = runtime
    state = spread(
        {k: torch.zeros_like(v) for k, v in whole(0).items()} if had is None else whole(had), dim
    )
    with counted() as came:
        ckpt.load(url, state)
    expected = spread(whole(version), dim)
    for name, tensor in expected.items():
        assert torch.equal(state[name].to_local(), tensor.to_local()), name
    return sum(came) / sum(tensor.to_local().nbytes for tensor in expected.values())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields the list of the bytes of files and deltas that come in this process."""
    came: list[int] = []
    fetch, delta = LiveStore.fetch, LiveStore.delta

    def fetched(self: LiveStore, file: str, offset: int, views: Any) -> None:
        came.append(sum(map(len, views)))
        fetch(self, file, offset, views)

    def differed(self: LiveStore, file: str, areas: Any) -> Any:
        data = delta(self, file, areas)
        came.append(0 if data is None else data.nbytes)
        return data

    with patch.object(LiveStore, "fetch", fetched), patch.object(LiveStore, "delta", differed):
        yield came


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of the servers' sockets, and an empty one, as of another host."""
    found = {place: str(tmp_path_factory.mktemp(place)) for place in ("here", "elsewhere")}
    for folder in found.values():
        os.chmod(folder, 0o700)
    return found


@pytest.fixture(scope="module")
def url(clusters: Callable[[int], Any], sockets: dict[str, str]) -> Iterator[str]:
    """Two versions, as of two ranks of another host."""
    found: str = clusters(2).run(begin, sockets["here"], "changing")[0]
    clusters(2).run(update, "changing", 1)
    yield found
    clusters(2).run(end, "changing")


@pytest.mark.parametrize("dim", [0, 1, None], ids=["rows", "columns", "replicas"])
def test_every_layout_gets_the_differences_alone(
    clusters: Callable[[int], Any], url: str, sockets: dict[str, str], dim: int | None
) -> None:
    parts = clusters(3).run(load, url, sockets["elsewhere"], dim, 1, 0)
    assert max(parts) < 1 / 25  # a hundredth has changed, and the tensors are small


@pytest.fixture
def elsewhere(sockets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process a reader on another host."""
    monkeypatch.setenv(RUNTIME, sockets["elsewhere"])


def test_targets_that_no_file_can_be_read_into_get_the_differences_too(
    url: str, elsewhere: None
) -> None:
    """As on a GPU: their bytes are copied, brought to the new version, and copied back."""
    before, after = whole(0), whole(1)
    state = {
        name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor
        for name, tensor in before.items()
    }
    with counted() as came:
        ckpt.load(url, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in after.items())
    assert not state["matrix"].is_contiguous()
    assert sum(came) < sum(tensor.nbytes for tensor in after.values()) / 25


def test_one_tensor_of_another_dtype_is_read_whole_beside_the_differences_of_the_others(
    url: str, elsewhere: None
) -> None:
    before, after = whole(0), whole(1)
    state = {**before, "bias": before["bias"].double()}
    with counted() as came:
        ckpt.load(url, state, dtype="target")
    assert all(torch.equal(state[name].to(one.dtype), one) for name, one in after.items())
    assert sum(came) < sum(tensor.nbytes for tensor in after.values()) / 25


MAPPING = """
[[rule]]
from = ["matrix", "matrix2"]
to = "fused"
rearrange = "* ... -> * ..."

[[rule]]
from = "cube"
to = "turned"
rearrange = "a b c -> c b a"
"""


@pytest.mark.thorough
def test_other_names_and_fused_tensors_get_the_differences(
    sockets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published in the readers' dtype, which the trainer's state does not have."""
    (tmp_path / "mapping.toml").write_text(MAPPING)

    def trained(version: int) -> dict[str, torch.Tensor]:
        found = whole(version)
        return {
            "matrix": found["matrix"].float(),
            "matrix2": found["moments"],
            "cube": found["cube"],
            "bias": found["bias"],
        }

    def engine(version: int) -> dict[str, torch.Tensor]:
        found = {name: tensor.bfloat16() for name, tensor in trained(version).items()}
        fused = torch.cat([found["matrix"], found["matrix2"]])
        return {
            "fused": fused,
            "turned": found["cube"].permute(2, 1, 0).contiguous(),
            "b": found["bias"],
        }

    monkeypatch.setenv(RUNTIME, sockets["here"])
    state = trained(0)
    with ckpt.publish(state, "mapped", dtype=torch.bfloat16) as live:
        for name, tensor in trained(1).items():
            state[name].copy_(tensor)
        live.update().wait(SECONDS)
        monkeypatch.setenv(RUNTIME, sockets["elsewhere"])
        target, after = engine(0), engine(1)
        with counted() as came:
            ckpt.load(
                live.url, target, mapping=str(tmp_path / "mapping.toml"), rename={"bias": "b"}
            )
    assert all(torch.equal(target[name], tensor) for name, tensor in after.items())
    assert sum(came) < sum(tensor.nbytes for tensor in after.values()) / 25


def rewrite(name: str) -> None:
    """A version of which each element is another one."""
    for tensor in _states[name].values():
        tensor.to_local().copy_(torch.randn(tensor.to_local().shape))
    _live[name].update().wait(SECONDS)


def deltas_of_a_load(url: str, runtime: str) -> int:
    """Loads the newest version; returns the number of deltas that came."""
    os.environ[RUNTIME] = runtime
    with patch.object(LiveStore, "delta", autospec=True, side_effect=LiveStore.delta) as asked:
        ckpt.load(url, spread(whole(0), 0))
    return asked.call_count


@pytest.mark.thorough
def test_a_version_of_which_all_has_changed_is_read_whole_after_one_small_delta(
    clusters: Callable[[int], Any], sockets: dict[str, str]
) -> None:
    found: str = clusters(2).run(begin, sockets["here"], "rewritten")[0]
    clusters(2).run(rewrite, "rewritten")
    assert clusters(3).run(deltas_of_a_load, found, sockets["elsewhere"]) == [1, 1, 1]
    clusters(2).run(end, "rewritten")


@pytest.mark.parametrize(
    "had", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (None, 1))]
)
def test_a_target_of_another_version_gets_what_it_lacks(
    clusters: Callable[[int], Any], url: str, sockets: dict[str, str], had: int | None
) -> None:
    parts = clusters(3).run(load, url, sockets["elsewhere"], 0, 1, had)
    assert min(parts) >= (0.0 if had == 1 else 0.3)
