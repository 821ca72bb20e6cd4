"""numpy's arrays, scalars and dtypes in a pickle, as records. numpy is not needed.

Rules:

1. An array whose dtype is one of tensors, little-endian and not structured, has its bytes here. Any
   other array is shown and not read.
2. A scalar becomes Python's own value, equal to it, as in `ckpt.save`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from struct import unpack

from formats.dtypes import BY_NAME, BY_TORCH_NAME, DType
from formats.errors import FormatError, HostileError
from formats.limits import ELEMENTS
from formats.pickle_records import Name, Opaque, shape_of

_CODES = {
    **{f"f{size}": f"F{8 * size}" for size in (2, 4, 8)},
    **{f"i{size}": f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"U{8 * size}" for size in (1, 2, 4, 8)},
    "b1": "BOOL",
    "c8": "C64",
    "c16": "C128",
}
_CODE_CHARS = 40
_UNPACKED = {"f2": "<e", "f4": "<f", "f8": "<d", "b1": "?", "c8": "<2f", "c16": "<2d"}
ARRAYS = frozenset(
    f"numpy.{name}"
    for name in ("ndarray", "memmap", "matrix", "core.memmap.memmap", "matrixlib.defmatrix.matrix")
)
"""Classes of arrays without content beside the elements."""


def dtype_of_code(code: str) -> DType | None:
    """Returns the dtype of a tensor for numpy's text for a dtype; None if tensors have none.

    >>> str(dtype_of_code("<f4")), dtype_of_code(">f4"), dtype_of_code("|O")
    ('float32', None, None)
    """
    order, kind = (code[:1], code[1:]) if code[:1] in "<>|=" else ("", code)
    name = _CODES.get(kind)
    return None if name is None or (order == ">" and not kind.endswith("1")) else BY_NAME[name]


def code_of(dtype: DType) -> str | None:
    """Returns numpy's text for the dtype of a tensor; None if numpy has none.

    >>> from formats.dtypes import BY_NAME
    >>> code_of(BY_NAME["F16"]), code_of(BY_NAME["U8"]), code_of(BY_NAME["BF16"])
    ('<f2', '|u1', None)
    """
    for kind, name in _CODES.items():
        if name == dtype.name:
            return f"{'|' if kind.endswith('1') else '<'}{kind}"
    return None


@dataclass(slots=True, eq=False)
class NumpyDType:
    """`numpy.dtype`, of which `build` sets the byte order."""

    code: str
    """numpy's text, such as `f4` or `U3`; of a dtype of `ml_dtypes` its name."""
    order: str = ""

    def build(self, state: object) -> None:
        """Sets the state of the pickle: version, order, base and shape, names, fields, ..."""
        if type(state) is not tuple or len(state) < 8 or state[1] not in ("<", ">", "|", "="):
            raise FormatError("the state of a numpy dtype is not one of numpy")
        self.order = str(state[1])
        if state[2] is not None or state[3] is not None:
            self.code = "V"  # structured

    @property
    def dtype(self) -> DType | None:
        """The dtype of a tensor with such elements; None if there is none."""
        if self.code in BY_TORCH_NAME:
            return BY_TORCH_NAME[self.code]
        return dtype_of_code(self.order + self.code)

    def __repr__(self) -> str:
        return f"{self.order}{self.code}".strip("|")


@dataclass(slots=True, eq=False)
class NumpyArray:
    """`numpy.ndarray`, of which `build` sets the content."""

    shape: tuple[int, ...] = ()
    numpy_dtype: NumpyDType | None = None
    is_fortran: bool = False
    data: bytes | None = None
    """The elements; None for an array of objects."""

    @classmethod
    def described(cls, code: str, shape: tuple[int, ...], is_fortran: bool) -> NumpyArray:
        """Returns an array without its elements; `code` is numpy's text for a dtype."""
        return cls(shape, NumpyDType(code), is_fortran)

    def build(self, state: object) -> None:
        """Sets the state of the pickle: version, shape, dtype, order and bytes."""
        if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], NumpyDType):
            raise FormatError("the state of a numpy array is not one of numpy")
        self.fill(state[1], state[2], state[4], bool(state[3]))

    def fill(self, shape: object, dtype: NumpyDType, data: object, is_fortran: bool) -> None:
        """Sets the content. Raises FormatError if the bytes are not those of the shape."""
        self.shape, self.numpy_dtype, self.is_fortran = shape_of(shape), dtype, is_fortran
        self.data = bytes(data) if isinstance(data, bytes) else None
        known = self.dtype
        if prod(size or 1 for size in self.shape) >= ELEMENTS:
            raise HostileError(f"a numpy array of shape {self.shape} has absurdly many elements")
        if known is not None and len(self.data or b"") != known.nbytes(self.shape):
            raise FormatError(
                f"a numpy array of shape {self.shape} and dtype {dtype!r} has "
                f"{len(self.data or b'')} bytes, {known.nbytes(self.shape)} are needed"
            )

    @property
    def dtype(self) -> DType | None:
        """The dtype of a tensor with these elements; None if there is none."""
        return None if self.numpy_dtype is None else self.numpy_dtype.dtype

    @property
    def is_numeric(self) -> bool:
        """Whether the elements are numbers, also of a dtype that no tensor has."""
        code = "" if self.numpy_dtype is None else self.numpy_dtype.code
        return self.data is not None and code.lstrip("<>|=")[:1] in ("b", "i", "u", "f", "c", "V")

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in elements."""
        found, step = [], 1
        for size in self.shape if self.is_fortran else reversed(self.shape):
            found.append(step)
            step *= size
        return tuple(found if self.is_fortran else reversed(found))

    def __repr__(self) -> str:
        return f"numpy.ndarray of {self.numpy_dtype!r}"


def numpy_dtype(arguments: tuple[object, ...]) -> object:
    """Makes `numpy.dtype(code, align, copy)`."""
    code = arguments[0]
    if isinstance(code, Name):
        return NumpyDType(code.full.rpartition(".")[2])
    if type(code) is not str or len(code) > _CODE_CHARS:
        raise FormatError(f"a numpy dtype is made of a {type(code).__name__}")
    return NumpyDType(code)


def reconstructed(arguments: tuple[object, ...]) -> object:
    """Makes an empty array of a class, whose state follows."""
    kind = arguments[0]
    if not isinstance(kind, Name):
        raise FormatError("a numpy array is made of a value that is not a class")
    return NumpyArray() if kind.full in ARRAYS else Opaque(kind.full)


def from_buffer(arguments: tuple[object, ...]) -> object:
    """Makes an array of its bytes, as pickles of protocol 5 have it."""
    data, dtype, shape, order = arguments
    if not isinstance(dtype, NumpyDType):
        raise FormatError("a numpy array has no dtype")
    made = NumpyArray()
    made.fill(shape, dtype, data, order == "F")
    return made


def scalar(arguments: tuple[object, ...]) -> object:
    """Makes Python's value of a scalar; an opaque one of a scalar that Python lacks."""
    dtype, data = arguments
    if not isinstance(dtype, NumpyDType):
        raise FormatError("a numpy scalar has no dtype")
    code = dtype.code
    if code == "O":
        return data
    if isinstance(data, bytes) and dtype.order != ">":
        if code[:1] == "S":
            return data.rstrip(b"\0")
        if code[:1] == "U":
            return data.decode("utf-32-le").rstrip("\0")
        if code[:1] in ("i", "u") and code in _CODES and len(data) == int(code[1:]):
            return int.from_bytes(data, "little", signed=code[0] == "i")
        if code in _UNPACKED:
            real, *imaginary = unpack(_UNPACKED[code], data)
            return complex(real, *imaginary) if imaginary else real
    return Opaque(f"numpy scalar of {dtype!r}")
