"""Addresses of live states: parsed, written, and without their tokens in texts."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ArgumentError
from ckpt.stores.addresses import MOST_VERSION, NAME, LiveUrl, parse, version_of
from ckpt.stores.store import is_live
from sharding.errors import without_secrets

NAMES = st.from_regex(NAME, fullmatch=True)
TOKENS = st.text(min_size=1).filter(lambda text: text.isprintable())


@given(
    st.sampled_from(["10.0.0.7", "node-3.cluster", "::1", "fe80::2"]),
    st.integers(1, 65535),
    NAMES,
    st.none() | st.integers(0, MOST_VERSION),
    st.none() | TOKENS,
)
def test_an_address_is_read_as_it_was_written(
    host: str, port: int, name: str, version: int | None, token: str | None
) -> None:
    url = LiveUrl(host, port, name, version, token)
    assert parse(str(url)) == url
    assert parse(url.shown) == LiveUrl(host, port, name, version)
    assert is_live(str(url))


@pytest.mark.parametrize(
    "url",
    [
        "live://host/policy",
        "live://:4000/policy",
        "live://host:port/policy",
        "live://host:0/policy",
        "live://host:99999/policy",
        "live://host:4000",
        "live://host:4000/",
        "live://host:4000/.policy",
        "live://host:4000/a/b",
        "live://host:4000/a/01",
        "live://host:4000/a/-1",
        "live://host:4000/a/1/file",
        "live://host:4000/a/9223372036854775808",
        "live://host:4000/a%2fb",
        "live://me:secret@host:4000/a",
        "live://host:4000/a#1",
        "live://host:4000/a?token=",
        "live://host:4000/a?token=1&token=2",
        "live://host:4000/a?key=1",
        "live://[::1/a",
        "http://host:4000/a",
        "policy",
        "",
    ],
)
def test_another_text_is_an_error_that_names_the_form(url: str) -> None:
    with pytest.raises(ArgumentError, match="the form is live://host:port/name"):
        parse(url)


@given(st.text())
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    with suppress(ArgumentError):
        parse(f"live://{text}")


def test_an_error_does_not_tell_the_token() -> None:
    with pytest.raises(ArgumentError) as caught:
        parse("live://host/policy?token=SECRET")
    assert "SECRET" not in str(caught.value)


@given(NAMES, TOKENS.map(lambda text: f"SECRET{text}"))
def test_texts_hide_the_token(name: str, token: str) -> None:
    url = LiveUrl("host", 4000, name, 3, token)
    assert "SECRET" not in without_secrets(f"no version: {url}: load again")
    assert "SECRET" not in f"{url.shown} {url!r}"


@pytest.mark.parametrize("text", ["", "-1", "+1", "00", "1.0", "1e3", " 1", "\u0661", "1" * 20])
def test_a_version_is_written_in_one_way(text: str) -> None:
    assert version_of(text) is None
