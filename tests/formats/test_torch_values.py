"""Everything that people put into torch.save: read as data, by its parts, or shown as an object.

Each value is saved by torch in both of its formats and, if Python can, by pickle alone.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import pickle
import types
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import MismatchError
from formats.catalog import OpaqueValue
from formats.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of quantised and sparse tensors


class Color(enum.Enum):
    RED = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    lr: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    lr: float = 0.1


Point = collections.namedtuple("Point", "x y")


class AttributeDict(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


class Text(str):
    pass


class Named(torch.Tensor):
    pass


class Pair(torch.Tensor):
    """Wraps two tensors, as quantised tensors of torchao do."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined]

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, *rest: Any) -> Any:
        raise NotImplementedError  # torch asks for the method; nothing here calls an operation


def function(x: object) -> object:
    return x


def described(tensor: torch.Tensor, **attributes: object) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def without_warnings(make: Any) -> Any:
    """The function, without torch's warnings of kinds of tensors that it deprecates."""

    @functools.wraps(make)
    def made(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(*arguments)

    return made


@without_warnings
def quantised(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.5, 1, dtype)


@without_warnings
def per_channel(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.ones(2, 4), scales, zeros, 0, dtype)


def o(kind: str) -> OpaqueValue:
    return OpaqueValue(kind)


HERE = __name__
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
STATE = np.random.RandomState(3).get_state()
NOW = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
META = "torch.Tensor on the meta device, without data"
MADE = "numpy.random._pickle.__generator_ctor"
FORTRAN = np.asfortranarray(np.arange(6.0).reshape(2, 3))
A, B = torch.arange(3.0), torch.arange(4)

VALUES: dict[str, tuple[Callable[[], Any], Any]] = {
    # numpy's values are data.
    "float64": (lambda: np.float64(1.5), 1.5),
    "float16": (lambda: np.float16(1.5), 1.5),
    "int8": (lambda: np.int8(-3), -3),
    "uint64": (lambda: np.uint64(2**64 - 1), 2**64 - 1),
    "bool_": (lambda: np.bool_(True), True),
    "str_": (lambda: np.str_("aß"), "aß"),
    "bytes_": (lambda: np.bytes_(b"ab"), b"ab"),
    "complex64": (lambda: np.complex64(1 + 2j), 1 + 2j),
    "array": (
        lambda: ARRAY,
        ARRAY,
    ),
    "array in Fortran's order": (lambda: FORTRAN, FORTRAN),
    "array of no dimensions": (lambda: np.array(3), np.array(3)),
    "array of no elements": (lambda: np.zeros((0, 3), "u2"), np.zeros((0, 3), "u2")),
    "large array": (lambda: np.arange(600_000), np.arange(600_000)),
    "complex array": (lambda: np.array([1 + 2j]), np.array([1 + 2j])),
    "random state": (
        lambda: STATE,
        STATE,
    ),
    # Other things of numpy are shown.
    "datetime64": (lambda: np.datetime64("2020-01-01"), o("numpy scalar of <M8")),
    "longdouble": (lambda: np.longdouble(1), o("numpy scalar of <f16")),
    "objects": (lambda: np.array([1, "a"], dtype=object), o("numpy.ndarray of O8")),
    "texts": (lambda: np.array(["a", "bc"]), o("numpy.ndarray of <U2")),
    "big-endian": (lambda: np.arange(3, dtype=">f4"), o("numpy.ndarray of >f4")),
    "structured": (lambda: np.zeros(2, dtype=[("a", "f4")]), o("numpy.ndarray of V")),
    "masked": (lambda: np.ma.array([1, 2], mask=[0, 1]), o("numpy.ma.core._mareconstruct")),
    "dtype of numpy": (lambda: np.dtype("f4"), o("numpy.dtype <f4")),
    "class of numpy": (lambda: np.float32, o("numpy.float32")),
    "generator of numpy": (
        lambda: np.random.default_rng(0),
        o(MADE),
    ),
    # Objects are shown.
    "namespace": (lambda: argparse.Namespace(lr=0.1), o("argparse.Namespace")),
    "datetime": (
        lambda: NOW,
        o("datetime.datetime"),
    ),
    "timedelta": (lambda: datetime.timedelta(1), o("datetime.timedelta")),
    "enum": (lambda: Color.RED, o(f"{HERE}.Color")),
    "flag": (lambda: Bits.A | Bits.B, o(f"{HERE}.Bits")),
    "dataclass": (Config, o(f"{HERE}.Config")),
    "slotted dataclass": (Slotted, o(f"{HERE}.Slotted")),
    "function": (lambda: function, o(f"{HERE}.function")),
    "class": (lambda: nn.Linear, o("torch.nn.modules.linear.Linear")),
    "builtin": (lambda: len, o("builtins.len")),
    "partial": (lambda: functools.partial(function, 1), o("functools.partial")),
    "simple namespace": (lambda: types.SimpleNamespace(a=1), o("types.SimpleNamespace")),
    "text of a subclass": (lambda: Text("a"), o(f"{HERE}.Text")),
    "decimal": (lambda: decimal.Decimal("1.5"), o("decimal.Decimal")),
    "uuid": (lambda: uuid.UUID(int=3), o("uuid.UUID")),
    "type of None": (lambda: type(None), o("builtins.NoneType")),
    "exception": (lambda: ValueError("x"), o("builtins.ValueError")),
    "bound method": (
        lambda: Point(1, 2)._asdict,
        o(f"{HERE}.Point._asdict"),
    ),
    "namedtuple": (lambda: Point(1, 2), o(f"{HERE}.Point")),
    "slice": (lambda: slice(1, 2), o("builtins.slice")),
    "keys of an enum": (lambda: {Color.RED: 1}, o("dict with keys that are not text or numbers")),
    "keys of bytes": (lambda: {b"a": 1}, o("dict with keys that are not text or numbers")),
    # Collections become the nearest of a tree.
    "ordered dict": (lambda: collections.OrderedDict(a=1), {"a": 1}),
    "default dict": (lambda: collections.defaultdict(list, a=[1]), {"a": [1]}),
    "counter": (lambda: collections.Counter("aab"), {"a": 2, "b": 1}),
    "deque": (lambda: collections.deque([1, A], maxlen=3), [1, A]),
    "attribute dict": (lambda: AttributeDict(a=1, w=A), {"a": 1, "w": A}),
    "items": (lambda: Items([1, A]), [1, A]),
    "namedtuple of tensors": (lambda: Point(A, 2), (A, 2)),
    "set": (lambda: {2, 1}, [1, 2]),
    "path": (lambda: PurePosixPath("a/b"), "a/b"),
    "size": (lambda: torch.Size([2, 3]), (2, 3)),
    "device": (lambda: torch.device("cuda", 1), "cuda:1"),
    "scheme": (lambda: torch.per_tensor_affine, "torch.per_tensor_affine"),
    # Tensors of every kind are data.
    "parameter": (lambda: nn.Parameter(A), A),
    "parameter with attributes": (lambda: described(nn.Parameter(A), note="x"), A),
    "buffer": (lambda: nn.Buffer(A), A),
    "subclass": (lambda: A.as_subclass(Named), A),
    "float8": (lambda: A.to(torch.float8_e4m3fn), A.to(torch.float8_e4m3fn)),
    "storage": (lambda: torch.arange(3.0).untyped_storage(), A.view(torch.uint8)),
    "wrapper of tensors": (lambda: Pair(A, B), {"a": A, "b": B}),
    "generator": (lambda: torch.Generator(), (67280421310721, None, torch.Generator().get_state())),
    **{
        str(dtype): (
            functools.partial(quantised, dtype),
            {
                "int_repr": quantised(dtype).int_repr(),
                "qscheme": "torch.per_tensor_affine",
                "scale": 0.5,
                "zero_point": 1,
            },
        )
        for dtype in (torch.qint8, torch.quint8, torch.qint32)
    },
    "per channel": (
        per_channel,
        {
            "int_repr": per_channel().int_repr(),
            "qscheme": "torch.per_channel_affine",
            "scales": torch.tensor([0.5, 0.25]).double(),
            "zero_points": torch.tensor([0, 1]),
            "axis": 0,
        },
    ),
    "COO": (
        lambda: torch.eye(3).to_sparse(),
        {
            "layout": "torch.sparse_coo",
            "indices": torch.arange(3).expand(2, 3),
            "values": torch.ones(3),
            "size": (3, 3),
            "is_coalesced": True,
        },
    ),
    "CSR": (
        lambda: torch.eye(2).to_sparse_csr(),
        {
            "layout": "torch.sparse_csr",
            "crow_indices": torch.arange(3),
            "col_indices": torch.arange(2),
            "values": torch.ones(2),
            "size": (2, 2),
        },
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        {
            "values": torch.ones(5),
            "sizes": torch.tensor([[2], [3]]),
            "strides": torch.tensor([[1], [1]]),
            "storage_offsets": torch.tensor([0, 2]),
        },
    ),
    # Tensors without elements in the file are shown.
    "meta": (
        lambda: torch.empty(2, device="meta"),
        o(META),
    ),
    "conjugate": (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        o("torch.Tensor, the conjugate or negative of its bytes"),
    ),
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or found.dtype != expected.dtype:
            return False
        same_bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected)]
        return found.shape == expected.shape and torch.equal(*same_bits)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        pairs = ((found[key], expected[key]) for key in expected)
        return list(found) == list(expected) and all(same(*pair) for pair in pairs)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def read(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ckpt.UnverifiedWarning)
        return ckpt.read(path)


@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize("way", ["zip", "row of pickles", "protocol 5"])
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_is_read_as_data_or_shown(kind: str, way: str, tmp_path: Path) -> None:
    make, expected = VALUES[kind]
    options: dict[str, Any] = {
        "zip": {},
        "row of pickles": {"_use_new_zipfile_serialization": False},
        "protocol 5": {"pickle_protocol": 5},
    }[way]
    value = {"before": A, "x": make(), "after": {"lr": 0.1}}
    torch.save(value, tmp_path / "a.pt", **options)
    found = read(tmp_path / "a.pt")
    assert same(found["x"], expected), found["x"]
    assert same(found["before"], A)
    assert found["after"] == {"lr": 0.1}
    assert ckpt.verify(tmp_path / "a.pt").sound


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["array", "large array", "parameter", "per channel", "enum"])
def test_a_file_of_pickle_alone_is_read(kind: str, protocol: int, tmp_path: Path) -> None:
    make, expected = VALUES[kind]
    with open(tmp_path / "a.pkl", "wb") as file:
        pickle.dump({"x": make(), "w": A, "again": [A]}, file, protocol)
    found = read(tmp_path / "a.pkl")
    assert same(found["x"], expected)
    assert same(found["again"], [A])
    assert "no checksums" in ckpt.verify(tmp_path / "a.pkl").checked


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model[1].tied = model[0].weight
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.5}]
    )
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("new", [True, False])
def test_a_whole_module_and_optimizer_are_their_state_dicts(new: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    value = {"model": model, "optimizer": optimizer, "scheduler": argparse.Namespace(of=optimizer)}
    torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    found = read(tmp_path / "a.pt")
    assert same(found["model"], dict(model.state_dict()))
    assert same(found["optimizer"], optimizer.state_dict())
    assert found["scheduler"] == OpaqueValue("argparse.Namespace")
    target = copy.deepcopy(model)
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    ckpt.load(tmp_path / "a.pt", {"model": target}, strict=False)
    assert same(dict(target.state_dict()), dict(model.state_dict()))


def test_objects_that_refer_to_each_other_are_read(tmp_path: Path) -> None:
    one, other = argparse.Namespace(w=A), argparse.Namespace(w=B)
    one.other, other.other = other, one
    torch.save({"x": one}, tmp_path / "a.pt")
    found = read(tmp_path / "a.pt")["x"]
    assert same(found["w"], A)
    assert found["other"]["other"] == OpaqueValue("argparse.Namespace")


def test_a_torchscript_program_is_its_attributes(tmp_path: Path) -> None:
    model, _ = trained()
    torch.jit.script(nn.Sequential(model[0], nn.BatchNorm1d(3))).save(str(tmp_path / "a.pt"))
    with ckpt.open(tmp_path / "a.pt") as opened:
        assert opened.catalog.format == "torchscript"
        assert same(opened["0.weight"][...], model[0].weight.detach())
        assert opened.catalog.tree["1"]["training"] is True  # type: ignore[index, call-overload]
    assert ckpt.verify(tmp_path / "a.pt").sound


def test_a_conversion_leaves_objects_out_by_name(tmp_path: Path) -> None:
    state = {"model": {"w": A}, "args": argparse.Namespace(lr=1), "log": [1, Color.RED]}
    torch.save(state, tmp_path / "a.pt")
    for target in ("a", "b.pt", "c.safetensors"):
        report = ckpt.convert(tmp_path / "a.pt", tmp_path / target)
        assert report.left_out[:2] == ("args", "log.1")
    expected = {"model": {"w": A}, "log": [1, None]}
    assert same(ckpt.read(tmp_path / "a"), expected)
    assert same(ckpt.read(tmp_path / "b.pt"), expected)
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "d.safetensors", select="model")
    assert report.left_out == ()
    torch.save(argparse.Namespace(), tmp_path / "e.pt")
    with pytest.raises(UnsupportedError, match=r"only <argparse\.Namespace>"):
        ckpt.convert(tmp_path / "e.pt", tmp_path / "e")


def test_a_load_that_asks_for_an_object_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": A, "args": argparse.Namespace()}, tmp_path / "a.pt")
    with pytest.raises(MismatchError, match=r"args: is <argparse\.Namespace> in the checkpoint"):
        ckpt.load(tmp_path / "a.pt", {"w": torch.zeros(3), "args": None})
    target = {"w": torch.zeros(3)}
    ckpt.load(tmp_path / "a.pt", target, strict=False)
    assert same(target["w"], A)


def test_a_comparison_says_that_objects_have_only_classes(tmp_path: Path) -> None:
    for name, lr in (("a.pt", 1), ("b.pt", 2)):
        torch.save({"w": A, "args": argparse.Namespace(lr=lr)}, tmp_path / name)
    found = ckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.equal
    assert found.notes == ("args were compared by their classes alone: objects",)
    torch.save({"w": A, "args": Config()}, tmp_path / "c.pt")
    (difference,) = ckpt.diff(tmp_path / "a.pt", tmp_path / "c.pt").values
    assert (difference.a, difference.b) == ("<argparse.Namespace>", f"<{HERE}.Config>")


def test_a_folder_of_files_of_the_older_format_is_read(tmp_path: Path) -> None:
    torch.save({"w": A}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(ckpt.read(tmp_path), {"w": A})
    assert "number of elements before each storage" in ckpt.verify(tmp_path).checked
