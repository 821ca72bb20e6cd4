"""The byte budget: what its text may be, and that loading keeps to it."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.arguments import DEFAULT_BYTES, LEAST_BYTES, VARIABLE, memory_budget, parse_bytes


@given(count=st.integers(9, 1 << 20), unit=st.sampled_from(["MiB", "GiB", " MiB", "MB", "G"]))
def test_a_number_with_a_unit_is_so_many_bytes(count: int, unit: str) -> None:
    sizes = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "G": 10**9}
    assert parse_bytes(f"{count}{unit}") == count * sizes[unit.strip()]


def test_a_number_alone_is_bytes_and_nothing_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert memory_budget() == DEFAULT_BYTES
    monkeypatch.setenv(VARIABLE, "100000000")
    assert memory_budget() == 100_000_000


@pytest.mark.parametrize("text", ["64mb", "-1", "much", "1.5 GiBs", "8191KiB", "64 m", "1" * 30])
def test_text_that_is_no_size_is_refused_with_what_is_allowed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(tmp_path / "c", {"w": torch.ones(2)})
    monkeypatch.setenv(VARIABLE, text)
    target = torch.zeros(2)
    with pytest.raises(
        ValueError, match=f"{VARIABLE} is .*such as 64MiB.*at least {LEAST_BYTES >> 20}"
    ):
        ckpt.load(tmp_path / "c", {"w": target})
    assert not target.any()


@pytest.mark.parametrize("strided", [False, True])
def test_a_tensor_that_is_cast_goes_through_memory_of_the_budget(
    strided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = torch.arange(8 << 20, dtype=torch.float32).reshape(1 << 13, 1 << 10)  # 32 MiB
    ckpt.save(tmp_path / "c", {"w": saved, "v": saved[:5].clone()})
    monkeypatch.setenv(VARIABLE, str(LEAST_BYTES))
    staged: list[int] = []
    empty = torch.empty

    def counting(*arguments: object, **options: object) -> torch.Tensor:
        made = empty(*arguments, **options)  # type: ignore[call-overload]
        staged.append(made.nbytes)
        return made

    target = torch.zeros(1 << 10, 1 << 13, dtype=torch.float64).T if strided else None
    state = {
        "w": torch.zeros(saved.shape, dtype=torch.float64) if target is None else target,
        "v": torch.zeros(5, 1 << 10, dtype=torch.float64),
    }
    monkeypatch.setattr(torch, "empty", counting)
    tracemalloc.start()
    try:
        ckpt.load(tmp_path / "c", state, dtype="target")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(state["w"], saved.double())
    assert torch.equal(state["v"], saved[:5].double())
    assert max(staged) <= LEAST_BYTES // 2
    assert peak <= LEAST_BYTES
