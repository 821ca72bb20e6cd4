"""Every reader against checkpoints that were changed on purpose, and against its peers.

A changed checkpoint is read, or refused with one of our errors: see tests/fuzz/mutations.py for how
it is changed, and tests/fuzz/folders.py for what is done with it. `FUZZ_EXAMPLES` says how many.
"""

from __future__ import annotations

import io
import os
import pickle
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from ckpt.plan.read_plan import requests_for
from ckpt.transfer.read import read_requests
from formats.errors import FormatError
from formats.pickles import machine
from formats.safetensors import file as safetensors_file
from sharding.layout import Box, Piece
from tests.fuzz.folders import Folder, exercise
from tests.fuzz.mutations import changed, changed_pickle, hostile
from tests.fuzz.seeds import Seed, seeds

numbers = st.integers(0, 2**64 - 1)


def fuzzed(examples: int) -> settings:
    """The settings of a test: the same examples every time, unless there are to be more."""
    asked = int(os.environ.get("FUZZ_EXAMPLES", "0"))
    return settings(
        max_examples=asked or examples,
        derandomize=not asked,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@pytest.mark.parametrize("seed", seeds(), ids=lambda seed: f"{seed.kind}-{seed.file}")
def test_every_seed_is_sound(seed: Seed) -> None:
    assert exercise(seed.files, seed.file) is not None


@pytest.mark.thorough
@given(numbers)
@fuzzed(700)
def test_a_changed_checkpoint_is_read_or_refused(number: int) -> None:
    seed, files = hostile(number)
    exercise(files, seed.file)


@given(numbers)
@fuzzed(150)
def test_a_checkpoint_changed_twice_is_read_or_refused(number: int) -> None:
    seed, files = hostile(number)
    try:
        files = changed(seed._replace(files=files), Random(number))
    except Exception:  # no longer what the mutator takes apart
        return
    exercise(files, seed.file)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_changed_checkpoints_are_read_or_refused() -> None:
    for number in range(50_000):
        seed, files = hostile(number)
        exercise(files, seed.file)


# Peers.


def values_of(file: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What our reader reads of a safetensors file: dtype, shape and bytes by name."""
    folder = Folder({"f": file})
    found = {}
    for name, record in safetensors_file.read(folder, "f").tensors.items():
        memory = np.zeros(record.nbytes, np.uint8)
        whole = [Piece.packed(Box.whole(record.shape))]
        read_requests(folder, requests_for(record, whole), [memoryview(memory.data)])
        found[name] = (record.dtype.name, record.shape, memory.tobytes())
    return found


STRICTER = (
    "has the key",  # a key twice anywhere: the library looks at tensors only
    "its metadata",  # our own keys of the metadata say what cannot be
    "smaller than a byte",
    "which cannot be read as a tensor",
    "absurd shape",  # zeros beside sizes that overflow
    "dimensions, the limit is",
    "not a JSON number",
    "limit is",
    "has dtype",
)
"""What our reader refuses in files that the library accepts, each for a reason of its own."""


@given(numbers)
@fuzzed(400)
def test_what_the_safetensors_library_rejects_is_refused(number: int) -> None:
    random = Random(number)
    seed = random.choice([seed for seed in seeds() if seed.kind == "safetensors"])
    (file,) = changed(seed, random).values()
    try:
        theirs = dict(deserialize(file))
    except SafetensorError:
        with pytest.raises(FormatError):
            values_of(file)
        return
    ours, message = None, ""
    try:
        ours = values_of(file)
    except FormatError as error:
        message = str(error)
    if ours is None:
        assert any(reason in message for reason in STRICTER), message
        return
    assert set(ours) == set(theirs)
    for name, (dtype, shape, data) in ours.items():
        assert data == bytes(theirs[name]["data"])
        if dtype not in ("C128", "C32"):
            assert shape == tuple(theirs[name]["shape"])


class Named(Exception):
    """A pickle names something, which the peer below must not import."""


class Plain(pickle.Unpickler):
    """Python's own unpickler, for plain values."""

    def find_class(self, module: str, name: str) -> object:
        raise Named

    def persistent_load(self, reference: object) -> object:
        raise Named


@given(numbers)
@fuzzed(500)
def test_what_is_read_of_a_changed_pickle_is_what_python_reads(number: int) -> None:
    random = Random(number)
    value = {
        "a": [1, (2, 3.5), None, {4}, {frozenset({5})}],
        "b": {"c": b"x", (1, 2): "y"},
        "d": [2**70, True],
    }
    data = changed_pickle(pickle.dumps(value, random.choice((2, 3, 4, 5))), random)
    try:
        ours = machine.load(data, "f")
    except FormatError:
        return
    try:
        theirs = Plain(io.BytesIO(data)).load()
    except (Named, MemoryError):  # the peer makes room for any number of the memo
        return
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("data", [b"cbuiltins\n\n.", b"c\nset\n."])
def test_a_pickle_that_names_nothing_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="names nothing"):
        machine.load(data, "f")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_frozen_sets_in_a_pickle_are_read_as_such_also_as_keys(protocol: int) -> None:
    value = [frozenset({4}), frozenset[int](), {5, frozenset({6, (7,)})}, {(8, frozenset({9})): 10}]
    assert repr(machine.load(pickle.dumps(value, protocol), "f")) == repr(value)
