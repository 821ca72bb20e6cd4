"""Writes pickles that torch reads: plain values and the records of `formats.pickles.records`.

The pickles have protocol 2, as those of torch.save: `torch.load(weights_only=True)` knows its
opcodes. This writer writes each opcode itself, so it needs no torch and stores nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from struct import pack

from formats.dtypes import DType
from formats.pickles.names import STORAGE_NAMES
from formats.pickles.records import (
    FIELDS,
    RECORDS,
    BytesStorageMetadata,
    Record,
    Storage,
    StoredTensor,
    TensorProperties,
)
from sharding.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class StateDict:
    """An OrderedDict with attributes: a state dict of torch with its `_metadata`."""

    items: Mapping[object, object]
    attributes: Mapping[str, object]


NAMES = {cls: name for name, cls in reversed(RECORDS.items())}
"""The name of each record's class in torch; the newest one if it has had several."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the reader of the pickle makes: `torch.Size((2, 3))`."""

    name: str
    """Module and name of the callee."""
    arguments: tuple[object, ...]


def dump(value: object) -> bytes:
    """Returns the pickle of a nest of values, records and calls.

    A repeated tensor, text or name is written once and shared.

    Raises:
        ArgumentError: a value has a type, or an integer a size, that cannot be pickled.
    """
    writer = _Writer()
    writer.value(value)
    return bytes(pickle.PROTO + b"\x02" + writer.data + pickle.STOP)


class _Writer:
    """The bytes so far, and the places of values in the reader's memo."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.memo: dict[object, int] = {}

    def value(self, value: object) -> None:
        match value:
            case None:
                self.data += pickle.NONE
            case bool():
                self.data += pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                self.integer(value)
            case float():
                self.data += pickle.BINFLOAT + pack(">d", value)
            case str():
                self.text(value)
            case bytes():
                self.call("_codecs.encode", (value.decode("latin-1"), "latin1"))
            case complex():
                self.call("builtins.complex", (value.real, value.imag))
            case list():
                self.data += pickle.EMPTY_LIST + pickle.MARK
                self.values(value)
                self.data += pickle.APPENDS
            case tuple():
                self.data += pickle.MARK
                self.values(value)
                self.data += pickle.TUPLE
            case dict():
                self.data += pickle.EMPTY_DICT
                self.items(value)
            case _:
                self.record(value)

    def values(self, values: list[object] | tuple[object, ...]) -> None:
        for value in values:
            self.value(value)

    def items(self, items: Mapping[object, object]) -> None:
        self.data += pickle.MARK
        self.values([each for pair in items.items() for each in pair])
        self.data += pickle.SETITEMS

    def record(self, value: object) -> None:
        match value:
            case DType(torch_name=name):
                self.name(f"torch.{name}")
            case Call(name, arguments):
                self.call(name, arguments)
            case StateDict(items, attributes):
                self.call("collections.OrderedDict", ())
                self.items(items)
                self.value(dict(attributes))
                self.data += pickle.BUILD
            case Storage():
                self.storage(value)
            case StoredTensor():
                self.tensor(value)
            case _ if isinstance(value, Record):
                self.instance(value)
            case _:
                raise ArgumentError(f"a value of type {type(value).__name__} cannot be pickled")

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.data += pickle.BININT1 + pack("<B", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.data += pickle.BININT + pack("<i", value)
        else:
            nbytes = value.bit_length() // 8 + 1
            if nbytes > 255:
                raise ArgumentError(
                    f"an integer of {nbytes} bytes cannot be pickled, at most 255 can"
                )
            self.data += pickle.LONG1 + pack("<B", nbytes)
            self.data += value.to_bytes(nbytes, "little", signed=True)

    def text(self, value: str) -> None:
        if not self.write_known(value):
            encoded = value.encode("utf-8", "surrogatepass")
            self.data += pickle.BINUNICODE + pack("<I", len(encoded)) + encoded
            self.remember(value)

    def name(self, full: str) -> None:
        if not self.write_known(("name", full)):
            module, _, name = full.rpartition(".")
            self.data += pickle.GLOBAL + f"{module}\n{name}\n".encode()
            self.remember(("name", full))

    def call(self, name: str, arguments: tuple[object, ...]) -> None:
        self.name(name)
        self.value(arguments)
        self.data += pickle.REDUCE

    def storage(self, value: Storage) -> None:
        kind = STORAGE_NAMES.get(value.dtype.torch_name)
        self.data += pickle.MARK
        self.text("storage")
        self.name(f"torch.{kind}" if kind else "torch.storage.UntypedStorage")
        self.values((value.key, "cpu", value.numel if kind else value.nbytes))
        self.data += pickle.TUPLE + pickle.BINPERSID

    def tensor(self, value: StoredTensor) -> None:
        if self.write_known(("tensor", value)):
            return
        hooks = Call("collections.OrderedDict", ())
        view = (value.storage, value.at, value.shape, value.strides, False, hooks)
        if value.dtype.torch_name in STORAGE_NAMES:
            self.call("torch._utils._rebuild_tensor_v2", view)
        else:
            self.call("torch._utils._rebuild_tensor_v3", (*view, value.dtype))
        self.remember(("tensor", value))

    def instance(self, value: Record) -> None:
        self.name(NAMES[type(value)])
        self.data += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        state = {name: getattr(value, name) for name in FIELDS[type(value)]}
        if isinstance(value, TensorProperties):
            self.value(tuple(state.values()))
        elif not isinstance(value, BytesStorageMetadata):
            self.value({name: each for name, each in state.items() if each is not None})
        else:
            return
        self.data += pickle.BUILD

    def write_known(self, key: object) -> bool:
        """Writes a reference to a value that was written before. Returns False if it was not."""
        place = self.memo.get(key)
        if place is None:
            return False
        self.data += pickle.LONG_BINGET + pack("<I", place)
        return True

    def remember(self, key: object) -> None:
        place = self.memo[key] = len(self.memo)
        self.data += pickle.LONG_BINPUT + pack("<I", place)
