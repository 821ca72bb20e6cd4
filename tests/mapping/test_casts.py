"""The dtypes that a conversion gives to names."""

from __future__ import annotations

import pytest

from ckpt.state.patterns import NO_CASTS, Casts
from sharding.errors import ArgumentError


def test_the_first_pattern_that_matches_a_name_counts() -> None:
    casts = Casts.of({"a.*": "float32", "*.b": None, "*": "float16"})
    assert [str(casts.of_name(name)) for name in ("a.b", "x.b", "x")] == [
        "float32",
        "None",
        "float16",
    ]


def test_floats_have_one_dtype_only_if_every_name_gets_it() -> None:
    assert str(Casts.of("bfloat16").of_all) == "bfloat16"
    assert str(Casts.of({"a": "bfloat16", "*": "bfloat16"}).of_all) == "bfloat16"
    for several in (
        {"a": "float32", "*": "bfloat16"},
        {"a": None, "*": "float16"},
        {"a": "float16"},
    ):
        assert Casts.of(several).of_all is None
    assert NO_CASTS.of_all is None


def test_a_dtype_of_all_names_needs_no_name_and_one_of_a_pattern_does() -> None:
    Casts.of("float16").check_all_match([], "there")
    with pytest.raises(ArgumentError, match="there: dtype: 'a' matches no name"):
        Casts.of({"a": "float16", "*": "float32"}).check_all_match(["b"], "there")
