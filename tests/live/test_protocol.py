"""Messages: read as they were written, and refused if they are anything else."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import (
    AccessDeniedError,
    CkptError,
    ExistsError,
    NotACheckpointError,
    ProtocolError,
    StoreTimeoutError,
    VersionGoneError,
)
from ckpt.live import protocol
from ckpt.live.protocol import STATUS, FileAt, RefusedError, Request, Segment
from ckpt.stores.addresses import FILE, MOST_VERSION, NAME

NAMES = st.from_regex(NAME, fullmatch=True)
VERSIONS = st.integers(0, MOST_VERSION)
FILES = st.from_regex(FILE, fullmatch=True)
SECONDS = st.floats(0, protocol.MOST_SECONDS)
ADDRESSES = st.tuples(st.text(min_size=1, max_size=255), st.integers(1, 65535))
PLACES = st.dictionaries(
    FILES, st.builds(FileAt, VERSIONS, st.lists(ADDRESSES, max_size=3).map(tuple)), max_size=3
)
SEGMENTS = st.lists(st.builds(Segment, st.integers(0, 9), VERSIONS, VERSIONS), max_size=4)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.builds(protocol.Hello),
    st.builds(protocol.Own, NAMES, SECONDS),
    st.builds(protocol.Put, NAMES, VERSIONS, FILES, SEGMENTS.map(tuple)),
    st.builds(protocol.Commit, NAMES, VERSIONS, PLACES, st.dictionaries(TEXTS, TEXTS, max_size=2)),
    st.builds(protocol.Retire, NAMES, VERSIONS, SECONDS),
    st.builds(protocol.Reclaim, NAMES, VERSIONS, SECONDS),
    st.builds(protocol.Drop, NAMES, VERSIONS, st.booleans()),
    st.builds(protocol.Get, NAMES, VERSIONS, FILES, TEXTS),
    st.builds(protocol.Take, NAMES, st.none() | VERSIONS, ADDRESSES, TEXTS),
    st.builds(protocol.Versions, NAMES),
    st.builds(protocol.Remove, NAMES, SECONDS),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(REQUESTS)
def test_a_request_is_read_as_it_was_written(request: Request) -> None:
    assert protocol.request_of(protocol.request_message(request)) == request


@given(REQUESTS, st.data())
def test_a_request_with_one_changed_field_is_read_or_refused(
    request: Request, data: st.DataObject
) -> None:
    found = json.loads(protocol.request_message(request))
    found[data.draw(st.sampled_from(sorted(found)))] = data.draw(VALUES)
    with suppress(RefusedError):
        protocol.request_of(json.dumps(found).encode())


@given(REQUESTS, st.data())
def test_a_request_without_one_field_or_with_one_more_is_refused(
    request: Request, data: st.DataObject
) -> None:
    found = json.loads(protocol.request_message(request))
    key = data.draw(st.sampled_from([*found, "more"]))
    if key in found:
        del found[key]
    else:
        found[key] = 1
    with pytest.raises(RefusedError):
        protocol.request_of(json.dumps(found).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        protocol.request_of(data)
    assert caught.value.kind == "protocol"


@given(PLACES)
def test_files_are_read_as_they_were_written(files: dict[str, FileAt]) -> None:
    told = json.loads(json.dumps(protocol.files_json(files)))
    assert protocol.files_of("files", told) == files


@pytest.mark.parametrize("kind", STATUS)
def test_every_kind_of_refusal_is_an_error_of_ours(kind: str) -> None:
    found = protocol.error_of(kind, "why", where="live://h:1/policy")
    assert isinstance(found, CkptError)
    assert str(found) == "live://h:1/policy: why"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("token", AccessDeniedError),
        ("unknown", NotACheckpointError),
        ("exists", ExistsError),
        ("timeout", StoreTimeoutError),
        ("range", ProtocolError),
        ("never heard of", ProtocolError),
    ],
)
def test_a_kind_has_its_class(kind: str, error: type[CkptError]) -> None:
    assert type(protocol.error_of(kind, "why")) is error


def test_a_replaced_version_is_named_with_the_newest() -> None:
    found = protocol.error_of("gone", "why", where="live://h:1/policy", version=12, newest=14)
    assert isinstance(found, VersionGoneError)
    assert (found.version, found.newest) == (12, 14)
