"""Reads pickles as data, without imports, calls or code of the file.

This is the stack machine of Python's pickle module (protocols 2 to 5), reduced to the content of
checkpoints, for a pickle that is the whole of its bytes and for the first of several in a file. Its
safety rules, next to those of `formats.pickles.names`:

1. A class or function of the file is looked up in a table of known names and never imported. REDUCE
   and NEWOBJ of another name make an `Opaque`. BUILD accepts only a record or dict of this pickle.
2. Extension codes, which Python resolves through a registry of the process, are refused.
3. No number of the file sizes memory: text and bytes are slices of the file, the memo grows by
   one, and integers have at most `INTEGER_BYTES`.
4. A key is hashed or compared only after `check_key`, and no dict gets many keys with one hash.
5. Steps are counted, and so are elements that calls copy: the pickle cannot copy one part a
   thousand times.
6. Any other invalid byte is a FormatError with its position.

The result may contain itself, or one part many times: a walk over it needs bounds. The standard
library's pickletools describes the opcodes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from struct import Struct
from struct import error as StructError

from formats.errors import FormatError, HostileError, UnsupportedError
from formats.limits import INTEGER_BYTES, KeysApart, check, current, limit_error
from formats.pickles.names import MAKERS, resolve, storage
from formats.pickles.records import FIELDS, RECORDS, Name, Opaque, Record, Storage, check_key, fill
from formats.pickles.values import NumpyArray, NumpyDType

SET_STEPS = 3
"""A new set counts as so many steps: it takes as much memory."""

FREE_COPIES = 1 << 18
"""Elements that calls may copy beyond one for each byte of the pickle."""

STORED_INSIDE = "torch.storage._load_from_bytes"
"""The function that makes a storage of the bytes of a file of torch.save."""

_UNSOUND = (LookupError, TypeError, ValueError, OverflowError, RecursionError, StructError)
"""The errors of the machine for invalid bytes."""

_U16, _I32, _U32, _U64, _F64 = (Struct(code) for code in ("<H", "<i", "<I", "<Q", ">d"))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The content of a pickle that may be followed by other bytes."""

    value: object
    end: int
    """The first byte behind the pickle."""
    storages: Mapping[str, Storage]
    """The storages that it refers to, by key."""
    attributes: Mapping[int, object]
    """The attributes of OrderedDicts, by the `id` of each dict in `value`."""


@dataclass(slots=True)
class _Machine:
    """The stack with its marks, the memo, and the position in the bytes."""

    data: bytes
    at: int
    is_inside: bool
    """Whether the pickle is that of a storage in another pickle."""
    storages: dict[str, Storage] = field(default_factory=dict)
    """The storages outside of the pickle, by key."""
    attributes: dict[int, object] = field(default_factory=dict)
    having: list[object] = field(default_factory=list)
    """The dicts with attributes, so that no other object gets their `id`."""
    stack: list[object] = field(init=False)
    below: list[list[object]] = field(default_factory=list)
    """The stacks below the marks. Only an opcode that removes a mark reaches below it."""
    memo: list[object] = field(default_factory=list)
    sparse: dict[int, object] = field(default_factory=dict)
    """The memo of a pickle that leaves out numbers, which no pickler does."""
    frame_end: int = -1
    """The end of the present frame; -1 outside of a frame."""
    copied: int = 0
    keys: KeysApart = field(default_factory=KeysApart)
    push: Callable[[object], None] = field(init=False)
    pop: Callable[[], object] = field(init=False)

    def __post_init__(self) -> None:
        self.use([])

    def run(self) -> object:
        data, steps, end = self.data, _STEPS, len(self.data)
        most = current().pickle_steps
        for _ in range(most):
            if self.at == self.frame_end:
                self.frame_end = -1
            if self.at >= end:
                raise FormatError("the pickle ends before its end mark: the file was truncated")
            opcode = data[self.at]
            if opcode == _STOP:
                if len(self.stack) != 1 or self.below:
                    raise FormatError("values are left at the end of the pickle")
                if self.frame_end not in (-1, self.at + 1):
                    raise FormatError("the last frame does not end with the pickle")
                return self.stack[0]
            step = steps[opcode]
            if step is None:
                raise UnsupportedError(
                    f"opcode {data[self.at : self.at + 1]!r} is not one that torch writes"
                )
            self.at += 1
            step(self)
        raise limit_error("pickle_steps", most + 1, "the pickle")

    # Parts of steps.

    def take(self, nbytes: int) -> bytes:
        """Returns the next bytes of the file. Raises FormatError if there are fewer."""
        end = self.at + nbytes
        if end > len(self.data):
            raise FormatError(f"{nbytes} bytes are announced, the pickle ends before")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, struct: Struct) -> int:
        (value,) = struct.unpack_from(self.data, self.at)
        self.at += struct.size
        return int(value)

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def copy(self, elements: int) -> None:
        """Counts copied elements. Raises HostileError if they are more than the file has bytes."""
        self.copied += elements
        if self.copied > len(self.data) + FREE_COPIES:
            raise HostileError("the pickle copies parts of itself repeatedly")

    # The memo.

    def put(self, number: int) -> None:
        if number == len(self.memo):
            self.memo.append(self.stack[-1])
        elif number < len(self.memo):
            self.memo[number] = self.stack[-1]
        else:
            self.copy(1)
            self.sparse[number] = self.stack[-1]

    def get(self, number: int) -> None:
        known = self.memo
        self.push(known[number] if number < len(known) else self.sparse[number])

    def frame(self, nbytes: int) -> None:
        """Begins a frame: it ends with an opcode and contains no other frame."""
        if self.frame_end >= 0 or nbytes > len(self.data) - self.at:
            raise FormatError(f"a frame of {nbytes} bytes does not end where an opcode does")
        self.frame_end = self.at + nbytes

    def pop_marked(self) -> list[object]:
        """Removes the last mark, and returns the values above it."""
        items = self.stack
        self.use(self.below.pop())
        return items

    def use(self, stack: list[object]) -> None:
        self.stack, self.push, self.pop = stack, stack.append, stack.pop

    def mark(self) -> None:
        self.below.append(self.stack)
        self.use([])

    def drop(self) -> None:
        if self.stack:
            self.pop()
        else:
            self.pop_marked()

    # Collections.

    def make_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise FormatError(f"a tuple of {length} is announced, the stack is shorter")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    def push_tuple(self) -> None:
        items = self.pop_marked()  # first: it changes the stack to which the tuple is pushed
        self.push(tuple(items))

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is Opaque:
            if target.items is None:
                target.items = []
            target = target.items
        if type(target) is not list:
            raise FormatError(f"items are appended to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is Opaque:
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise FormatError(
                f"{len(items)} keys and values are put into a {type(target).__name__}"
            )
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                check_key(key)
                self.keys.check(key, target)
            target[key] = value

    def add_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise FormatError(f"members are added to a {type(target).__name__}")
        for item in items:
            check_key(item)
            self.keys.check(item, target)
        target.update(items)

    def empty_set(self) -> None:
        self.copy(SET_STEPS)
        self.push(set())

    def frozen_set(self) -> None:
        items = self.pop_marked()
        self.copy(SET_STEPS)
        self.push(MAKERS["builtins.frozenset"]((items,)))

    # Names, and the calls that an ordinary unpickler would make.

    def name_in_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise FormatError("a class or function has a name that is not text")
        self.push(resolve(module, name))

    def name_in_lines(self) -> None:
        module, name = self.line(), self.line()
        if not module or not name:
            raise FormatError("an opcode names nothing: the line of a module or name is empty")
        self.push(resolve(module, name))

    def old_instance(self) -> None:
        self.name_in_lines()
        raise UnsupportedError("opcode b'i' makes an instance in a way that torch never writes")

    def call(self) -> None:
        arguments, callee = self.pop(), self.pop()
        if type(callee) is Opaque and type(arguments) is tuple:
            self.push(Opaque(callee.type, arguments))
            return
        if not isinstance(callee, Name) or type(arguments) is not tuple:
            raise FormatError(f"a {type(callee).__name__} is called, which cannot be called")
        if callee.full in MAKERS or callee.full == STORED_INSIDE:
            for each in arguments:
                if type(each) in _COPIED:
                    self.copy(len(each))
            made = MAKERS.get(callee.full)
            if made is None:
                self.push(_storage_inside(*arguments, is_inside=self.is_inside))
            else:
                self.push(made(arguments))
        elif callee.full in RECORDS:
            if arguments:
                raise FormatError(
                    f"{callee.full} is called with {len(arguments)} arguments, not with 0"
                )
            self.push(RECORDS[callee.full]())
        else:
            self.push(Opaque(callee.full, arguments))

    def call_with_keywords(self) -> None:
        keywords = self.pop()
        self.call()
        if keywords != {} and type(self.stack[-1]) is not Opaque:
            raise FormatError("a class is called with keyword arguments, which it does not take")

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if type(target) is dict:
            self.attributes[id(target)] = state  # of an OrderedDict: `_metadata` of a module
            self.having.append(target)
            return
        if isinstance(target, NumpyArray | NumpyDType):
            target.build(state)
            return
        if type(target) is Opaque:
            target.state = state
            return
        if type(target) not in FIELDS:
            raise FormatError(f"a {type(target).__name__} is given a state, which it cannot have")
        assert isinstance(target, Record)
        fill(target, state)

    def outside(self) -> None:
        found = storage(self.pop())
        if isinstance(found, Storage):
            known = self.storages.setdefault(found.key, found)
            if known.nbytes != found.nbytes:
                raise FormatError(f"the storage {found.key} has two sizes")
        self.push(found)

    def extension(self) -> None:
        raise HostileError(
            "the pickle asks for an extension code of Python's copyreg registry, which a "
            "checkpoint never needs; nothing was executed"
        )

    # The rest.

    def integer(self, length: int) -> None:
        if not 0 <= length <= INTEGER_BYTES:
            raise HostileError(
                f"an integer of {length} bytes is refused, the limit is {INTEGER_BYTES}"
            )
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def real(self) -> None:
        (value,) = _F64.unpack(self.take(8))
        self.push(value)

    def text(self, length: int) -> None:
        self.push(self.take(length).decode("utf-8", "surrogatepass"))

    def old_text(self, length: int) -> None:
        self.push(self.take(length).decode("latin-1"))  # Python 2's str

    def check_protocol(self) -> None:
        protocol = self.byte()
        if not 2 <= protocol <= pickle.HIGHEST_PROTOCOL:
            raise UnsupportedError(f"pickle protocol {protocol} is not read, only 2 to 5")


Step = Callable[[_Machine], object]

_STOP = pickle.STOP[0]

_COPIED = frozenset({list, tuple, dict, set, frozenset, str, bytes})

_BY_OPCODE: dict[bytes, Step] = {
    pickle.PROTO: _Machine.check_protocol,
    pickle.FRAME: lambda m: m.frame(m.number(_U64)),
    pickle.MARK: _Machine.mark,
    pickle.POP: _Machine.drop,
    pickle.POP_MARK: lambda m: m.pop_marked(),
    pickle.DUP: lambda m: m.push(m.stack[-1]),
    # Values.
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number(_I32)),
    pickle.BININT1: lambda m: m.push(m.byte()),
    pickle.BININT2: lambda m: m.push(m.number(_U16)),
    pickle.LONG1: lambda m: m.integer(m.byte()),
    pickle.LONG4: lambda m: m.integer(m.number(_I32)),
    pickle.BINFLOAT: _Machine.real,
    pickle.SHORT_BINSTRING: lambda m: m.old_text(m.byte()),
    pickle.BINSTRING: lambda m: m.old_text(m.number(_U32)),
    pickle.SHORT_BINUNICODE: lambda m: m.text(m.byte()),
    pickle.BINUNICODE: lambda m: m.text(m.number(_U32)),
    pickle.BINUNICODE8: lambda m: m.text(m.number(_U64)),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.take(m.byte())),
    pickle.BINBYTES: lambda m: m.push(m.take(m.number(_U32))),
    pickle.BINBYTES8: lambda m: m.push(m.take(m.number(_U64))),
    pickle.BYTEARRAY8: lambda m: m.push(m.take(m.number(_U64))),
    # Collections.
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE1: lambda m: m.make_tuple(1),
    pickle.TUPLE2: lambda m: m.make_tuple(2),
    pickle.TUPLE3: lambda m: m.make_tuple(3),
    pickle.TUPLE: _Machine.push_tuple,
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.append([m.pop()]),
    pickle.APPENDS: lambda m: m.append(m.pop_marked()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_marked()),
    pickle.EMPTY_SET: _Machine.empty_set,
    pickle.ADDITEMS: lambda m: m.add_items(m.pop_marked()),
    pickle.FROZENSET: _Machine.frozen_set,
    # The memo.
    pickle.BINGET: lambda m: m.get(m.byte()),
    pickle.LONG_BINGET: lambda m: m.get(m.number(_U32)),
    pickle.BINPUT: lambda m: m.put(m.byte()),
    pickle.LONG_BINPUT: lambda m: m.put(m.number(_U32)),
    pickle.MEMOIZE: lambda m: m.put(len(m.memo) + len(m.sparse)),
    # Names and calls.
    pickle.GLOBAL: _Machine.name_in_lines,
    pickle.STACK_GLOBAL: _Machine.name_in_stack,
    pickle.INST: _Machine.old_instance,
    pickle.REDUCE: _Machine.call,
    pickle.NEWOBJ: _Machine.call,
    pickle.NEWOBJ_EX: _Machine.call_with_keywords,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: _Machine.outside,
    pickle.EXT1: _Machine.extension,
    pickle.EXT2: _Machine.extension,
    pickle.EXT4: _Machine.extension,
}

_STEPS: list[Step | None] = [_BY_OPCODE.get(bytes([opcode])) for opcode in range(256)]


LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The first two pickles of a file of torch.save before 1.6."""
COUNT_BYTES = 8
"""The bytes of the number of elements before each storage of such a file."""


def load(data: bytes, where: str) -> object:
    """Returns the content of a pickle as plain values and records of `formats.pickles.records`.

    `where` begins each message: the file and, if it has several pickles, the place of this one.

    Raises:
        HostileError: the pickle has a name of an attack, or an absurd size.
        UnsupportedError: the pickle has an older protocol, or a kind of tensors that is not read.
        FormatError: the pickle is not valid.
    """
    return load_whole(data, where).value


def load_whole(data: bytes, where: str) -> Loaded:
    """Returns the content of a pickle, with the attributes of its dicts. Raises as `load` does."""
    loaded = load_first(data, where)
    if loaded.end != len(data):
        raise FormatError(f"{where}: bytes follow the pickle, which ends at byte {loaded.end}")
    return loaded


def load_first(data: bytes, where: str, at: int = 0, is_inside: bool = False) -> Loaded:
    """Returns the content of the pickle at byte `at`. Raises as `load` does.

    `is_inside` is for a pickle in another one; it may have no third one inside.
    """
    check("pickle_bytes", len(data) - at, where)
    machine = _Machine(data, at, is_inside)
    try:
        value = machine.run()
        return Loaded(value, machine.at + 1, machine.storages, machine.attributes)
    except FormatError as error:
        advice = "; restore the file from another copy" if type(error) is FormatError else ""
        raise type(error)(f"{where}: {error} (byte {machine.at} of the pickle){advice}") from None
    except _UNSOUND as error:
        raise FormatError(
            f"{where}: the pickle is not valid at byte {machine.at} of {len(data)} "
            f"({type(error).__name__}: {error}); restore the file from another copy"
        ) from None


def load_row(data: bytes, where: str, is_inside: bool = False) -> Loaded:
    """Returns the content of the pickles at the beginning of a file of torch.save before 1.6.

    These are a magic number, a version, the sizes of C's types, the state, and the keys of the
    storages, which follow. `storages` has them in the order of the file. Raises as `load` does.
    """
    values, at = [], 0
    for _ in range(5):
        loaded = load_first(data, where, at, is_inside)
        values.append(loaded)
        at = loaded.end
    magic, version, system, state, keys = values
    if magic.value != LEGACY_MAGIC or version.value != LEGACY_VERSION:
        raise FormatError(f"{where}: not a file of torch.save")
    if not isinstance(system.value, dict) or system.value.get("little_endian") is not True:
        raise UnsupportedError(
            f"{where}: it was written on a big-endian machine; load it there with torch.load and "
            "save it again"
        )
    listed = keys.value if isinstance(keys.value, list) else []
    found = {
        key: state.storages[key] for key in listed if type(key) is str and key in state.storages
    }
    if not len(listed) == len(found) == len(state.storages):
        raise FormatError(f"{where}: the listed storages are not those of the state")
    return Loaded(state.value, at, found, state.attributes)


def _storage_inside(data: object, *, is_inside: bool) -> Storage:
    """Returns the storage in the bytes of a file of torch.save, as plain pickles have it."""
    if is_inside:
        raise FormatError("the pickle of a storage has a storage inside")
    if type(data) is not bytes:
        raise FormatError("a storage is not in bytes of its own")
    row = load_row(data, "a storage in the pickle", is_inside=True)
    found = row.value
    if not isinstance(found, Storage) or len(data) - row.end != COUNT_BYTES + found.nbytes:
        raise FormatError("the bytes of a storage have another length")
    return replace(found, data=data[row.end + COUNT_BYTES :])
