"""Every kind of leaf comes back exactly, or is refused by its key path with nothing written.

`EXACT` come back of the same type, `BECOME` as the value beside them, which equals what was saved,
`REFUSED` are errors that say what to write instead. A load gives the type that its target has.
"""

from __future__ import annotations

import enum
import io
import math
import pathlib
import random
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ckpt
from formats.dtypes import DTYPES
from tests.ckpt.test_state import Opaque, alike, bits, cycle, noise

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about half of these kinds of tensors
LIMIT_BITS = 8192


class Colour(str, enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Flag(enum.IntFlag):
    ON = 1


class Plain(enum.Enum):
    ONE = 1


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Row(list):  # type: ignore[type-arg]
    pass


class Bag(set):  # type: ignore[type-arg]
    pass


class Moment(datetime):
    pass


Point = namedtuple("Point", "x y")


@dataclass
class Config:
    """A dataclass with nothing special."""

    width: int = 3


class Marked(torch.Tensor):
    """A subclass that only adds methods."""


class Weight(nn.Parameter):
    """A parameter of a user's class."""


class Wrapping(torch.Tensor):
    """A subclass without memory of its own: it hands everything to another tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [each.inner if isinstance(each, Wrapping) else each for each in args]
        return function(*plain, **(kwargs or {}))


class Composed(Wrapping):
    """The same, and it says what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):  # type: ignore[no-untyped-def]
        return Composed(inner["inner"])


class Labelled(np.ndarray):  # type: ignore[type-arg]
    """An array that could have more than its elements."""


def lists_in_lists(depth: int) -> list[Any]:
    return [lists_in_lists(depth - 1)] if depth > 1 else []


class Foreign(timezone.__base__):  # type: ignore[name-defined,misc]
    """A time zone of the user's."""

    def utcoffset(self, moment: object) -> timedelta:
        return timedelta(hours=1)


DTYPES_HERE = [
    getattr(torch, each.torch_name) for each in DTYPES if hasattr(torch, each.torch_name)
]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return noise(shape, dtype, seed=7)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every dtype and of every form in memory; each keeps memory of its own."""
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES_HERE:
        found[f"{dtype} scalar"] = filled((1,), dtype).reshape(())
        found[f"{dtype} matrix"] = filled((3, 5), dtype)
        found[f"{dtype} transposed"] = filled((3, 5), dtype).T
        found[f"{dtype} one of a column"] = filled((3, 5), dtype).T[1:2, 2:]
        found[f"{dtype} empty"] = filled((0, 2), dtype)
    waves = torch.complex(torch.randn(3), torch.randn(3))
    found |= {
        "expanded": torch.arange(3.0).expand(4, 3),
        "overlapping": torch.arange(6.0).as_strided((3, 2), (1, 1)),
        "part of a storage": torch.arange(9.0)[4:6],
        "conjugated": waves.clone().conj(),
        "negated": torch._neg_view(torch.arange(3.0)),
        "imaginary part of a conjugate": waves.clone().conj().imag,
        "channels last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "asks for a gradient": torch.ones(3, requires_grad=True),
        "result of an operation": torch.ones(3, requires_grad=True) * 2,
        "made for inference": torch.inference_mode()(lambda: torch.ones(3))(),
        "buffer": nn.Buffer(torch.arange(4.0)),
        "not a number": torch.tensor([math.nan, -math.nan, math.inf, -0.0]),
        "subclass with methods": torch.arange(3.0).as_subclass(Marked),
        "parameter": nn.Parameter(torch.arange(3.0)),
        "parameter's subclass": Weight(torch.arange(3.0)),
        "many dimensions": torch.arange(1.0).reshape([1] * 30),
    }
    return found


def arrays() -> dict[str, np.ndarray]:
    """Arrays that are nothing but elements, of every dtype and of every form."""
    found: dict[str, np.ndarray] = {}
    names = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    for name in (*names, "float16", "float32", "float64", "complex64", "complex128"):
        found[f"array of {name}"] = np.arange(6).reshape(2, 3).astype(name)
        found[f"reversed array of {name}"] = np.arange(5).astype(name)[::-1]
        found[f"array of one {name}"] = np.array(1, dtype=name)
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    fields = np.zeros(3, dtype=[("a", "i1"), ("b", "f4")])
    fields["b"] = [1, 2, 3]
    found |= {
        "read-only array": frozen,
        "broadcast array": np.broadcast_to(np.arange(3.0), (2, 3)),
        "field of an array": fields["b"],
        "Fortran's order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "every second element": np.arange(8.0)[::2],
        "empty array": np.zeros((0, 3)),
        "matrix of numpy": np.matrix([[1.0, 2.0]]),
        "recarray of one type": np.arange(3.0).view(np.recarray),
        "native order by name": np.arange(3, dtype=np.dtype("f8").newbyteorder("=")),
    }
    return found


EXACT: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "negative": -7,
    "beyond 64 bits": 2**64,
    "largest integer": (1 << LIMIT_BITS) - 1,
    "smallest float": 5e-324,
    "largest float": 1.7976931348623157e308,
    "minus zero": -0.0,
    "nan": math.nan,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "tenth": 0.1,
    "complex": 1 - 2j,
    "complex of nan": complex(-0.0, math.nan),
    "no text": "",
    "text with a nul": "a\0b",
    "text beyond the plane": "\U0001f600",
    "half a surrogate": "\ud800",
    "long text": "x" * 1_000_000,
    "text like a tag": "$tensor",
    "no bytes": b"",
    "bytes": bytes(range(256)),
    "list": [1, [2, []]],
    "tuple": (1, (2, ())),
    "dict": {"a": {}},
    "dict like a tag": {"$typed": ["set", 1]},
    "two keys like tags": {"$typed": 1, "$set": 2},
    "deep": lists_in_lists(80),
    "dtype": torch.bfloat16,
    "dtype of integers": torch.uint16,
    "set": {1, "a", (1, 2), None, 2.5, b"x"},
    "empty set": set(),
    "set of sets": {frozenset({1}), frozenset()},
    "frozenset": frozenset({"b", "a"}),
    "deque": deque([1, [2], {"a": 3}]),
    "bounded deque": deque([1, 2], maxlen=5),
    "deque of no length": deque(maxlen=0),
    "bytearray": bytearray(b"ab\0"),
    "range": range(1, 9, 2),
    "backward range": range(9, 1, -2),
    "slice": slice(1, None, 2),
    "ellipsis": ...,
    "path": pathlib.Path("runs/../step-1"),
    "absolute path": pathlib.Path("/a b/é"),
    "path of nothing": pathlib.Path("."),
    "path of undecodable bytes": pathlib.Path("a\udcff"),
    "pure path": pathlib.PurePosixPath("a/b"),
    "path of Windows": pathlib.PureWindowsPath("c:\\a\\b"),
    "date": date(2024, 2, 29),
    "first date": date.min,
    "moment": datetime(2024, 2, 29, 13, 14, 15, 16),
    "second pass of a moment": datetime(2024, 10, 27, 2, 30, fold=1),
    "moment in UTC": datetime(2024, 2, 29, tzinfo=timezone.utc),
    "moment in a named zone": datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-5), "EST")),
    "last moment": datetime.max,
    "time": time(1, 2, 3, 4),
    "time in a zone": time(1, 2, tzinfo=timezone(timedelta(seconds=3661))),
    "duration": timedelta(days=-1, seconds=2, microseconds=3),
    "longest duration": timedelta.max,
    "zone": timezone.utc,
    "decimal": Decimal("1.10"),
    "decimal of many digits": Decimal("0." + "123456789" * 10),
    "decimal that is no number": Decimal("-sNaN12"),
    "fraction": Fraction(1, 3),
    "uuid": UUID(int=2**127 + 1),
    "device": torch.device("cpu"),
    "numbered device": torch.device("cuda", 3),
    "device without data": torch.device("meta"),
}
"""Values that `ckpt.read` gives back equal and of the same type."""

KEYS: dict[str, Any] = {
    "text": "a",
    "text with dots": "a.b",
    "text with blanks": " a ",
    "text like a number": "7",
    "no text": "",
    "half a surrogate": "\udfff",
    "like a tag": "$tensor",
    "integer": 7,
    "negative": -1,
    "beyond 64 bits": 2**70,
    "true": True,
    "float": 2.5,
    "tenth": 0.1,
    "minus zero": -0.0,
    "infinite": math.inf,
    "nan": math.nan,
    "none": None,
}
"""Keys that come back equal and of the same type."""

BECOME: dict[str, tuple[Any, Any]] = {
    "float64": (np.float64(0.1), 0.1),
    "float32": (np.float32(0.1), float(np.float32(0.1))),
    "float16": (np.float16(0.1), float(np.float16(0.1))),
    "complex64": (np.complex64(0.1 + 2j), complex(np.complex64(0.1 + 2j))),
    "complex128": (np.complex128(0.1 + 2j), 0.1 + 2j),
    "bool": (np.bool_(True), True),
    "int64": (np.int64(-(2**63)), -(2**63)),
    "uint64": (np.uint64(2**64 - 1), 2**64 - 1),
    "int32": (np.int32(5), 5),
    "int16": (np.int16(-5), -5),
    "int8": (np.int8(-5), -5),
    "uint8": (np.uint8(255), 255),
    "uint16": (np.uint16(65535), 65535),
    "uint32": (np.uint32(2**32 - 1), 2**32 - 1),
    "nan of numpy": (np.float32(math.nan), math.nan),
    "text of numpy": (np.str_("ab\0"), "ab\0"),
    "file in memory": (io.BytesIO(b"ab\0"), bytearray(b"ab\0")),
    "bytes of numpy": (np.bytes_(b"ab\0\0"), b"ab\0\0"),
    "size": (torch.Size([2, 3]), (2, 3)),
    "ordered dict": (OrderedDict(z=1, a=2), {"z": 1, "a": 2}),
    "dict with a default": (defaultdict(list, x=[1]), {"x": [1]}),
    "counter": (Counter("aab"), {"a": 2, "b": 1}),
}
"""Values that come back as Python's own type of them: what was saved -> what is read."""


def freed() -> torch.Tensor:
    tensor = torch.ones(2, dtype=torch.float64)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(16)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def masked() -> torch.Tensor:
    return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def branches() -> dict[str, object]:
    found: dict[str, object] = {}
    found |= {"a": found, "b": found}
    return found


class Mirror:
    def state_dict(self) -> Any:
        return self

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes nothing."""


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=layout)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "object": (Opaque, "a state holds tensors"),
    "str enum": (lambda: Colour.RED, "store its .value"),
    "int enum": (lambda: Level.LOW, "store its .value"),
    "int flag": (lambda: Flag.ON, "store its .value"),
    "enum": (lambda: Plain.ONE, "store its .value"),
    "str subclass": (lambda: Text("a"), r"store str\(\)"),
    "int subclass": (lambda: Whole(1), r"store int\(\)"),
    "float subclass": (lambda: Real(1), r"store float\(\)"),
    "bytes subclass": (lambda: Raw(b"a"), r"store bytes\(\)"),
    "dict subclass": (lambda: Table(a=1), r"store dict\(\)"),
    "list subclass": (lambda: Row([1]), r"store list\(\)"),
    "set subclass": (lambda: Bag([1]), r"store set\(\)"),
    "datetime subclass": (lambda: Moment(2024, 1, 1), r"store its isoformat\(\)"),
    "namedtuple": (lambda: Point(1, 2), r"store its _asdict\(\)"),
    "dataclass": (Config, r"store dataclasses\.asdict\(\)"),
    "namespace": (lambda: SimpleNamespace(a=1), "a state holds tensors"),
    "user dict": (lambda: UserDict(a=1), r"store dict\(\)"),
    "mapping proxy": (lambda: MappingProxyType({"a": 1}), r"store dict\(\)"),
    "chain of maps": (lambda: ChainMap({"a": 1}), r"store dict\(\)"),
    "view of keys": (lambda: {"a": 1}.keys(), "a state holds tensors"),
    "iterator": (lambda: iter([1]), r"store list\(\)"),
    "counter without end": (count, r"store list\(\)"),
    "function": (lambda: fake, "a checkpoint holds no code"),
    "partial": (lambda: partial(fake), "a checkpoint holds no code"),
    "method": (lambda: [].append, "a checkpoint holds no code"),
    "class": (lambda: nn.Linear, "a checkpoint holds no code"),
    "module of Python": (lambda: math, "a checkpoint holds no code"),
    "memoryview": (lambda: memoryview(b"a"), r"store bytes\(\)"),
    "array of Python": (lambda: array("f", [1]), r"store torch\.tensor\(\)"),
    "moment in a place": (lambda: datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC")), "store its name"),
    "moment in a zone of a user": (lambda: datetime(2024, 1, 1, tzinfo=Foreign()), "store its"),
    "zone of a place": (lambda: ZoneInfo("UTC"), "store its name"),
    "torch generator": (torch.Generator, r"store its get_state\(\)"),
    "numpy generator": (np.random.default_rng, "store its bit_generator.state"),
    "text file in memory": (lambda: io.StringIO("x"), r"store its getvalue\(\)"),
    "numpy bit generator": (np.random.PCG64, "store its .state"),
    "numpy random state": (np.random.RandomState, r"store its get_state\(\)"),
    "python generator": (random.Random, r"store its getstate\(\)"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "store a tensor over it"),
    "layout": (lambda: torch.strided, r"store str\(\)"),
    "memory format": (lambda: torch.channels_last, r"store str\(\)"),
    "dtype of numpy": (lambda: np.dtype("f4"), r"store str\(\)"),
    "dtype without tensors": (lambda: torch.qint8, "dtype torch.qint8 cannot be stored"),
    "exception": (lambda: ValueError("a"), "a state holds tensors"),
    "not implemented": (lambda: NotImplemented, "a state holds tensors"),
    "integer of too many bits": (lambda: 1 << LIMIT_BITS, "of 8193 bits"),
    "cycle": (cycle, "does it hold itself"),
    "cycle of two branches": (branches, "does it hold itself"),
    "object whose state is itself": (Mirror, "state_dict\\(\\) of a Mirror returns a Mirror"),
    "too deep": (lambda: lists_in_lists(150), "nests deeper"),
    "set of objects": (lambda: {Opaque()}, "a state holds tensors"),
    "set of enums": (lambda: {Plain.ONE}, "store its .value"),
    "set of tensors": (lambda: {torch.ones(1)}, "set with tensors"),
    "deque of tensors": (lambda: deque([torch.ones(1)]), "deque with tensors"),
    "slice of tensors": (lambda: slice(torch.ones(1)), "slice with tensors"),
    "masked array": (lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), r"\.data and its \.mask"),
    "masked without a mask": (lambda: np.ma.array([1.0]), r"\.data and its \.mask"),
    "masked constant": (lambda: np.ma.masked, r"\.data and its \.mask"),
    "structured array": (lambda: np.zeros(2, [("a", "i1")]), "store its fields by name"),
    "structured scalar": (lambda: np.zeros(2, [("a", "i1")])[0], "fields by name"),
    "record": (lambda: np.rec.array([(1, 2.0)])[0], "fields by name"),
    "recarray": (lambda: np.rec.array([(1, 2.0)]), "store its fields by name"),
    "void": (lambda: np.void(b"abc"), "tobytes"),
    "array of void": (lambda: np.zeros(2, "V3"), "view"),
    "big-endian array": (lambda: np.arange(3, dtype=">f4"), "newbyteorder"),
    "array of objects": (lambda: np.array([1, None], dtype=object), "tolist"),
    "array of text": (lambda: np.array(["a"]), "tolist"),
    "array of bytes": (lambda: np.array([b"a\0"]), "tolist"),
    "array of dates": (lambda: np.zeros(2, "M8[s]"), "its unit"),
    "array of durations": (lambda: np.zeros(2, "m8[s]"), "its unit"),
    "array of long doubles": (lambda: np.zeros(2, np.longdouble), "float64"),
    "array of long complex": (lambda: np.zeros(2, np.clongdouble), "complex128"),
    "array subclass": (lambda: np.ones(2).view(Labelled), r"numpy\.asarray\(\)"),
    "date of numpy": (lambda: np.datetime64("2024-01-01"), "its unit"),
    "moment of numpy": (lambda: np.datetime64("2024-01-01T00:00:00.000000001"), "its unit"),
    "no date": (lambda: np.datetime64("NaT"), "its unit"),
    "duration of numpy": (lambda: np.timedelta64(3, "s"), "its unit"),
    "duration without a unit": (lambda: np.timedelta64(3), "its unit"),
    "long double": (lambda: np.longdouble(1) / 3, r"store str\(\)"),
    "long complex": (lambda: np.clongdouble(1) / 3, r"store str\(\)"),
    "masked tensor": (masked, "get_mask"),
    "fake tensor": (fake, "fake tensor has a shape and no elements"),
    "functional tensor": (lambda: torch._to_functional_tensor(torch.ones(3)), "functional tensor"),
    "zeros without memory": (lambda: torch._efficientzerotensor((3,)), "without memory"),
    "meta tensor": (lambda: torch.ones(3, device="meta"), "meta device"),
    "freed tensor": (freed, "memory of this tensor was freed"),
    "tensor beyond its storage": (cut_short, "its storage has 16 bytes"),
    "wrapping subclass": (lambda: Wrapping(torch.ones(3)), "store its inner tensors"),
    "composed subclass": (lambda: Composed(torch.ones(3)), "wraps other tensors"),
    "lazy parameter": (nn.UninitializedParameter, "run it once"),
    "lazy buffer": (nn.UninitializedBuffer, "run it once"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "torch.sparse_csr tensor"),
    "sparse columns": (lambda: torch.eye(2).to_sparse_csc(), "torch.sparse_csc tensor"),
    "sparse blocks": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "torch.sparse_bsr tensor"),
    "nested": (lambda: nested(torch.strided), "nested tensor"),
    "jagged": (lambda: nested(torch.jagged), "nested tensor"),
    "quantized": (quantized, "quantised tensor"),
    **{
        f"tensor of {name}": (
            lambda name=name: torch.empty(4, dtype=getattr(torch, name)),
            f"dtype torch.{name} cannot be stored",
        )
        for name in ("bits8", "bits16", "uint1", "uint4", "int4", "int7")
        if hasattr(torch, name)
    },
}
"""What is refused, and the words that say what to do."""

REFUSED_KEYS: dict[str, tuple[Any, str]] = {
    "str enum": (Colour.RED, "use its .value"),
    "int enum": (Level.LOW, "use its .value"),
    "int flag": (Flag.ON, "use its .value"),
    "enum": (Plain.ONE, "use its .value"),
    "str subclass": (Text("a"), r"use str\(\) of it"),
    "int subclass": (Whole(1), r"use int\(\) of it"),
    "float subclass": (Real(1), r"use float\(\) of it"),
    "text of numpy": (np.str_("a"), r"use str\(\) of it"),
    "integer of numpy": (np.int64(1), "keys are strings, numbers, None or tuples"),
    "float of numpy": (np.float64(1), r"use float\(\) of it"),
    "bytes": (b"a", "keys are strings, numbers, None or tuples"),
    "complex": (1j, "keys are strings, numbers, None or tuples"),
    "tuple": ((1, (2,)), "keys are strings, numbers, None or tuples"),
    "frozenset": (frozenset(), "keys are strings, numbers, None or tuples"),
    "path": (pathlib.PurePosixPath("a"), "keys are strings, numbers, None or tuples"),
    "dtype": (torch.float32, "keys are strings, numbers, None or tuples"),
    "tensor": (torch.ones(1), "keys are strings, numbers, None or tuples"),
    "class": (nn.Linear, "keys are strings, numbers, None or tuples"),
    "integer of too many bits": (1 << LIMIT_BITS, "of 8193 bits"),
}


def of_same_type(one: Any, other: Any) -> bool:
    """Equal, and of one type at every place; sets and queues by what is in them."""
    if isinstance(one, set | frozenset):
        return type(one) is type(other) and one == other
    if isinstance(one, np.ndarray):
        same = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return same and one.tobytes() == other.tobytes()
    return alike(one, other)


def test_the_table_has_290_kinds() -> None:
    tables = (tensors(), arrays(), EXACT, KEYS, BECOME, REFUSED, REFUSED_KEYS)
    assert sum(map(len, tables)) >= 290


def test_what_can_be_stored_comes_back_exactly(tmp_path: Path) -> None:
    made, found_arrays = tensors(), arrays()
    state = {
        "tensors": made,
        "arrays": found_arrays,
        "values": EXACT,
        "keys": {name: {key: [name]} for name, key in KEYS.items()},
        "scalars": {name: saved for name, (saved, _) in BECOME.items()},
    }
    ckpt.save(tmp_path, state)
    found: Any = ckpt.read(tmp_path)
    assert list(found) == list(state)
    for name, tensor in made.items():
        assert type(found["tensors"][name]) is torch.Tensor, name
        assert found["tensors"][name].dtype == tensor.dtype, name
        assert found["tensors"][name].shape == tensor.shape, name
        assert bits(found["tensors"][name]) == bits(tensor), name
    for name, each in found_arrays.items():
        assert of_same_type(
            found["arrays"][name].numpy(),
            np.ascontiguousarray(each).view(np.ndarray).reshape(each.shape),
        ), name
    for name, value in EXACT.items():
        assert of_same_type(found["values"][name], value), name
    for name, key in KEYS.items():
        [(again, items)] = found["keys"][name].items()
        assert type(again) is type(key), name
        assert repr(again) == repr(key), name
        assert items == [name]
    for name, (_, expected) in BECOME.items():
        assert of_same_type(found["scalars"][name], expected), name


def test_a_load_gives_the_types_of_its_target(tmp_path: Path) -> None:
    made, found_arrays = tensors(), arrays()
    scalars = {name: saved for name, (saved, _) in BECOME.items() if "of numpy" not in name}
    ckpt.save(tmp_path, {"t": made, "a": found_arrays, "v": EXACT, "s": scalars})
    shared = ("expanded", "overlapping", "made for inference")
    target = {
        "t": {
            name: noise(tuple(each.shape), each.dtype, seed=9)
            for name, each in made.items()
            if name not in shared
        },
        "a": {name: np.zeros_like(each, subok=True) for name, each in found_arrays.items()},
        "v": dict.fromkeys(EXACT),
        "s": {name: emptied(value) for name, value in scalars.items()},
    }
    loaded = ckpt.load(tmp_path, target, exclude=[f"t.{name}" for name in shared])
    for name, each in loaded["t"].items():
        assert bits(each) == bits(made[name]), name
    for name, array_ in loaded["a"].items():
        assert type(array_) is type(found_arrays[name]), name
        assert array_.tobytes() == found_arrays[name].tobytes(), name
    for name, value in EXACT.items():
        assert of_same_type(loaded["v"][name], value), name
    for name, value in scalars.items():
        assert type(loaded["s"][name]) is type(value), name
        assert content(loaded["s"][name]) == content(value), name


def test_one_element_of_a_column_is_filled_in_place(tmp_path: Path) -> None:
    saved = {str(dtype): filled((1, 1), dtype) for dtype in DTYPES_HERE}
    ckpt.save(tmp_path, saved)
    whole = {str(dtype): noise((3, 5), dtype, seed=9) for dtype in DTYPES_HERE}
    target = {name: each.T[1:2, 2:] for name, each in whole.items()}
    ckpt.load(tmp_path, target)
    for name, each in whole.items():
        assert bits(each[2:, 1:2].clone()) == bits(saved[name]), name


@pytest.mark.parametrize("key", [0, None, True, 2.5], ids=str)
def test_two_keys_of_one_text_are_refused_though_their_entries_have_other_names(
    tmp_path: Path, key: Any
) -> None:
    for state in ({key: None, str(key): {"w": torch.ones(1)}}, {"a": {str(key): {}, key: [{}]}}):
        with pytest.raises(ckpt.StateError, match=f"both have the name '{key}'; rename a key"):
            ckpt.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


def test_a_place_for_one_nest_is_not_filled_from_two_of_its_name(tmp_path: Path) -> None:
    state = {"a.b": {"x": 1}, "a": {"b": {"y": torch.ones(1)}}}
    ckpt.save(tmp_path, state)
    assert ckpt.read(tmp_path) == state
    with pytest.raises(
        ckpt.StateError, match=r"two entries of the checkpoint have the name 'a\.b'"
    ):
        ckpt.load(tmp_path, {"a.b": None, "a": {"b": None}})
    target = {"a.b": {"x": 0}, "a": {"b": {"y": torch.zeros(1)}}}
    assert ckpt.load(tmp_path, target) == state


def test_a_target_that_contains_itself_is_refused(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": 1})
    for target in (branches(), {"a": cycle()}):
        with pytest.raises(ckpt.StateError, match="does it hold itself"):
            ckpt.load(tmp_path, target)
        with pytest.raises(ckpt.StateError, match="does it hold itself"):
            ckpt.state_dict.convert(target, to="full")


UNLIKE: dict[str, tuple[Any, Any]] = {
    "too large": (300, np.int8(1)),
    "too small": (-1, np.uint8(1)),
    "nan for an integer": (math.nan, np.int64(1)),
    "infinite for an integer": (math.inf, np.int64(1)),
    "complex for a float": (1j, np.float32(1)),
    "complex for an integer": (1j, np.int64(1)),
    "beyond every float": (10**400, np.float32(1)),
    "beyond half precision": (1e10, np.float16(1)),
    "tenth": (0.1, np.float32(1)),
}
"""Saved values that the type of numpy in the target does not have."""


def test_a_value_that_the_targets_type_does_not_have_is_loaded_as_it_was_saved(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path, {name: saved for name, (saved, _) in UNLIKE.items()} | {"nan": math.nan})
    target = {name: own for name, (_, own) in UNLIKE.items()}
    loaded: Any = ckpt.load(tmp_path, target | {"nan": np.float32(1)})
    for name, (saved, _) in UNLIKE.items():
        assert of_same_type(loaded[name], saved), name
    assert of_same_type(loaded["nan"], np.float32(math.nan))


def test_a_torch_size_of_numbers_that_it_does_not_have_is_loaded_as_a_tuple(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"size": (2.5, "a")})
    assert ckpt.load(tmp_path, {"size": torch.Size([1])}) == {"size": (2.5, "a")}


def emptied(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, dict):
        again = value.copy()
        again.clear()
        return again
    if isinstance(value, io.BytesIO):
        return io.BytesIO()
    return torch.Size([9]) if isinstance(value, torch.Size) else type(value)(0)


def content(value: Any) -> object:
    """What is compared of a value: that of a file, or its text."""
    return value.getvalue() if isinstance(value, io.BytesIO) else repr(value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_back_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    make, words = REFUSED[name]
    if name.startswith(("long", "array of long")) and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("a long double is a double here")
    state = {"first": torch.ones(2), "a": [1, {"leaf": make()}]}
    with pytest.raises(ckpt.StateError, match=words) as caught:
        ckpt.save(tmp_path / "c", state)
    assert str(caught.value).startswith("state['a'][1]['leaf']")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", REFUSED_KEYS)
def test_a_key_that_cannot_come_back_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    key, words = REFUSED_KEYS[name]
    for leaf in (1, torch.ones(1)):
        with pytest.raises(ckpt.StateError, match=words) as caught:
            ckpt.save(tmp_path / "c", {"first": torch.ones(2), "a": {"fine": 1, key: leaf}})
        assert str(caught.value).startswith("state['a']")
    assert not (tmp_path / "c").exists()


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "vmap": lambda inside: torch.vmap(inside)(torch.ones(3, 2)),
    "grad": lambda inside: torch.func.grad(inside)(torch.ones(2)),
    "jvp": lambda inside: torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda inside: torch.func.functionalize(inside)(torch.ones(2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_inside_a_function_transform_are_refused(tmp_path: Path, name: str) -> None:
    seen: list[str] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ckpt.StateError) as caught:
            ckpt.save(tmp_path / "c", {"a": x})
        seen.append(str(caught.value))
        return x.sum()

    TRANSFORMS[name](inside)
    assert seen[0].startswith("state['a']: a ")
    assert not (tmp_path / "c").exists()


def test_nothing_is_saved_or_loaded_while_torch_makes_fake_tensors(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    ckpt.save(tmp_path / "a", state)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ckpt.StateError, match="FakeTensorMode is active"):
            ckpt.save(tmp_path / "b", state)
        with pytest.raises(ckpt.StateError, match="FakeTensorMode is active"):
            ckpt.load(tmp_path / "a", state)
    assert not (tmp_path / "b").exists()


UNFIT: dict[str, tuple[Callable[[], object], str]] = {
    "masked array": (lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), "mask"),
    "big-endian array": (lambda: np.zeros(2, ">f8"), "newbyteorder"),
    "array of objects": (lambda: np.array([1, None], dtype=object), "tolist"),
    "masked tensor": (lambda: masked().double(), "get_mask"),
    "freed tensor": (freed, "was freed"),
    "functional tensor": (
        lambda: torch._to_functional_tensor(torch.zeros(2, dtype=torch.float64)),
        "functional tensor",
    ),
    "wrapping subclass": (lambda: Wrapping(torch.zeros(2, dtype=torch.float64)), "inner tensors"),
}
"""Targets that hold no elements which a load could fill."""


@pytest.mark.parametrize("name", UNFIT)
def test_a_target_without_elements_of_its_own_is_a_difference(tmp_path: Path, name: str) -> None:
    make, words = UNFIT[name]
    ckpt.save(tmp_path, {"first": torch.ones(2), "a": torch.ones(2, dtype=torch.float64)})
    first = torch.zeros(2)
    with pytest.raises(ckpt.MismatchError, match=words):
        ckpt.load(tmp_path, {"first": first, "a": make()})
    assert not first.any()


def test_another_format_refuses_what_it_has_no_word_for(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {"w": torch.ones(2), "seen": {1, 2}, "at": [Path("x")]})
    for to in ("torch", "dcp"):
        with pytest.raises(ckpt.UnsupportedError, match=r"seen is set\(1, 2\), and"):
            ckpt.convert(tmp_path / "a", tmp_path / to, to=to)
        assert not (tmp_path / to).exists()
        ckpt.convert(tmp_path / "a", tmp_path / to, to=to, exclude=["seen", "at", "at.*"])
    ckpt.convert(tmp_path / "a", tmp_path / "b")
    assert alike(ckpt.read(tmp_path / "b"), ckpt.read(tmp_path / "a"))
    assert not ckpt.diff(tmp_path / "a", tmp_path / "b").values
