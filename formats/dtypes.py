"""Element types by their safetensors names, and how each is carried in a safetensors file.

A type safetensors cannot hold is *carried* as one it can: complex128 as F64 with a last dimension
of 2, the rarer 8-bit floats as U8. Other names in this package always mean the true type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from formats.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. Every element is a whole number of bytes."""

    name: str
    """The name in files: safetensors' where it has one."""
    itemsize: int
    """Bytes per element."""
    torch_name: str
    """The attribute of `torch` that is this type."""
    carrier: str
    """The safetensors type its bytes are labelled with."""

    def __str__(self) -> str:
        return self.torch_name

    @property
    def component_bytes(self) -> int:
        """Bytes of the numbers an element consists of: half of a complex one, else all."""
        return self.itemsize // 2 if self.name.startswith("C") else self.itemsize

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a packed tensor of this shape."""
        return self.itemsize * prod(shape)

    def carrier_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape a packed tensor has in a safetensors header."""
        carrier_itemsize = BY_NAME[self.carrier].itemsize
        return (
            shape
            if carrier_itemsize == self.itemsize
            else (*shape, self.itemsize // carrier_itemsize)
        )


def _same(name: str, itemsize: int, torch_name: str) -> DType:
    return DType(name, itemsize, torch_name, name)


DTYPES = (
    _same("F64", 8, "float64"),
    _same("F32", 4, "float32"),
    _same("F16", 2, "float16"),
    _same("BF16", 2, "bfloat16"),
    _same("F8_E4M3", 1, "float8_e4m3fn"),
    _same("F8_E5M2", 1, "float8_e5m2"),
    DType("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", "U8"),
    DType("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", "U8"),
    DType("F8_E8M0", 1, "float8_e8m0fnu", "F8_E8M0"),
    DType("F4_E2M1X2", 1, "float4_e2m1fn_x2", "U8"),
    _same("C64", 8, "complex64"),
    DType("C128", 16, "complex128", "F64"),
    DType("C32", 4, "complex32", "F16"),
    _same("I64", 8, "int64"),
    _same("I32", 4, "int32"),
    _same("I16", 2, "int16"),
    _same("I8", 1, "int8"),
    _same("U64", 8, "uint64"),
    _same("U32", 4, "uint32"),
    _same("U16", 2, "uint16"),
    _same("U8", 1, "uint8"),
    _same("BOOL", 1, "bool"),
)

BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DTYPES}


def dtype_named(name: str, where: str) -> DType:
    """The type with this file name; `where` says which tensor of which file asks, for the error."""
    if name not in BY_NAME:
        raise UnsupportedError(f"{where}: unknown dtype {name!r}; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def dtype_of_torch(name: str, where: str) -> DType:
    """The type whose torch name (`bfloat16`, `torch.bfloat16`) this is."""
    found = BY_TORCH_NAME.get(name.removeprefix("torch."))
    if found is None:
        raise UnsupportedError(
            f"{where}: a tensor of dtype {name} cannot be stored; known are "
            + ", ".join(BY_TORCH_NAME)
        )
    return found
