"""The comparison of a conversion's result with its source."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.converting.native_target import check_written, outgoing
from ckpt.opening.sources import open_source
from ckpt.state.patterns import NO_CASTS
from formats.errors import CorruptError

ONES = torch.ones(2, 3)


def compare(folder: Path, wanted: Any, found: Any, target_format: str = "torch.save") -> None:
    """Compares two checkpoints as a conversion compares its source and its result."""
    with ExitStack() as stack:
        states = []
        for name, state in (("wanted", wanted), ("found", found)):
            ckpt.save(folder / name, state)
            source = stack.enter_context(open_source(folder / name))
            states.append(outgoing(source.url, source.store, source.catalog, NO_CASTS))
        check_written(*states, "the result", target_format)


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ({"a": ONES, "b": ONES + 1}, {"a": ONES}, "b: it is missing"),
        ({"a": ONES}, {"a": ONES.view(torch.int32)}, r"a: it is int32 \[2, 3\] and was float32"),
        (
            {"a": ONES},
            {"a": ONES.view(3, 2)},
            r"a: it is float32 \[3, 2\] and was",
        ),
        ({"a": ONES}, {"a": ONES + torch.eye(2, 3)[1]}, "a: element 1 has other bytes"),
        ({"a": ONES, "b": ONES}, {"a": ONES}, "b: it is missing"),
        ({"a": ONES, "step": 3}, {"a": ONES}, "step: the value is missing"),
        ({"a": ONES, "rate": 0.1}, {"a": ONES, "rate": 0.1 + 1e-16}, "rate: the value is 0.1"),
        ({"a": ONES, "step": 1}, {"a": ONES, "step": True}, "step: the value is True and was 1"),
    ],
)
def test_a_result_that_differs_is_an_error_that_names_the_difference(
    tmp_path: Path, wanted: Any, found: Any, said: str
) -> None:
    with pytest.raises(CorruptError, match=f"the result: {said}"):
        compare(tmp_path, wanted, found)


@pytest.mark.parametrize(
    ("wanted", "found", "target_format"),
    [
        (
            {"a": ONES, "b": {"c": [1, float("nan")]}},
            {"a": ONES, "b": {"c": [1, float("nan")]}},
            "",
        ),
        ({"a": ONES, "empty": {}}, {"a": ONES}, "torch.save"),
        ({"a": ONES, "step": 3}, {"a": ONES}, "safetensors"),
    ],
)
def test_a_result_is_equal_as_far_as_its_format_holds_values(
    tmp_path: Path, wanted: Any, found: Any, target_format: str
) -> None:
    compare(tmp_path, wanted, found, target_format)
