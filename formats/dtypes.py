"""Dtypes by their safetensors names, and their carriers in safetensors files.

A dtype that safetensors lacks has a *carrier* that it has: F64 with a last dimension of 2 for
complex128, U8 for the rarer 8-bit floats. Other names in this package mean the true dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from formats.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype. Each element is a whole number of bytes."""

    name: str
    """The name in files: that of safetensors if it has one."""
    itemsize: int
    """Bytes per element."""
    torch_name: str
    """The name of the attribute of `torch`."""
    carrier: str
    """The safetensors dtype with which the bytes are labelled."""

    def __str__(self) -> str:
        return self.torch_name

    @property
    def component_bytes(self) -> int:
        """The bytes of one number: half of a complex element, otherwise the whole element."""
        return self.itemsize // 2 if self.name.startswith("C") else self.itemsize

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a packed tensor of this shape."""
        return self.itemsize * prod(shape)

    def carrier_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a packed tensor in a safetensors header."""
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


_INFINITY = {"F64": 0x7FF << 52, "F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80, "F8_E5M2": 0x7C}
"""The bits of infinity by the name of a number's dtype: NaN has more, each finite number fewer."""
_INFINITY |= {"C128": _INFINITY["F64"], "C64": _INFINITY["F32"], "C32": _INFINITY["F16"]}
_INFINITY |= {"F8_E4M3": 0x7F}  # it has NaN alone
_ONLY_NAN = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF}
"""The bits of the one number that is not finite."""


def count_nonfinite(data: memoryview, dtype: DType) -> int:
    """Returns how many numbers in these bytes are NaN or infinite; a complex element has two.

    >>> import struct
    >>> packed = struct.pack("3e", 1.0, float("-inf"), float("nan"))
    >>> count_nonfinite(memoryview(packed), BY_NAME["F16"])
    2
    """
    import numpy as np  # a writer that does not count starts without numpy

    size, infinity = dtype.component_bytes, _INFINITY.get(dtype.name)
    bits = np.frombuffer(data, f"u{size}")
    if infinity is None:
        only = _ONLY_NAN.get(dtype.name)
        return 0 if only is None else int(np.count_nonzero(bits == only))
    if not bits.size:
        return 0
    # As integers the positive numbers are in order, and so are the negative ones without a sign:
    # two maxima, which make no copy, find whether there is anything to count.
    sign = 1 << (8 * size - 1)
    if bits.view(f"i{size}").max() < infinity and bits.max() < sign + infinity:
        return 0
    return int(np.count_nonzero((bits & bits.dtype.type(sign - 1)) >= infinity))


_CAST_ELEMENTS = 1 << 17
"""Elements that stay in the processor's cache while they are cast."""
_MOST = {"F32": 0x7F7FFFFF, "F16": 0x477FE000, "BF16": 0x7F7F0000}
"""The bits, as a float32, of the largest number of a dtype."""
_PLAIN = {"F32": "f4", "F16": "f2", "F64": "f8"}


def cast_plain(source: memoryview, stored: DType, target: memoryview, dtype: DType) -> bool:
    """Fills `target` with the elements of `source` in another dtype: the bits are those of torch.

    Returns False, with an undefined target, where only torch can: for a number that is not finite
    or beyond the range of the new dtype, and for other dtypes than floats of 16 and 32 bits.

    >>> import struct
    >>> target = bytearray(2)
    >>> cast_plain(memoryview(struct.pack("f", 1.01)), BY_NAME["F32"], memoryview(target),
    ...            BY_NAME["BF16"]), target.hex()
    (True, '813f')
    """
    import numpy as np  # most writers start without numpy

    if stored.name not in _MOST or dtype.name not in _MOST | _PLAIN:
        return False
    read = np.frombuffer(source, "u2" if stored.name == "BF16" else _PLAIN[stored.name])
    written = np.frombuffer(target, "u2" if dtype.name == "BF16" else _PLAIN[dtype.name])
    for at in range(0, len(read), _CAST_ELEMENTS):
        part, into = read[at : at + _CAST_ELEMENTS], written[at : at + _CAST_ELEMENTS]
        wide = part
        if stored.name == "BF16":
            wide = (part.astype("u4") << 16).view("f4")
        elif stored.name == "F16":
            wide = part.astype("f4")
        most = _MOST.get(dtype.name, _MOST["F32"])
        bits = wide.view("u4")
        # As integers positive numbers are in order, and negative ones come after them.
        if bits.view("i4").max() > most or bits.max() > (1 << 31) + most:
            return False
        if dtype.name == "BF16":  # to the nearest, and of two as near ones to the even
            rounded = bits >> 16
            rounded &= 1
            rounded += bits
            rounded += 0x7FFF
            rounded >>= 16
            into[:] = rounded
        else:
            into[:] = wide
    return True


def dtype_named(name: str, where: str) -> DType:
    """Returns the dtype with this file name. `where` names the file and the tensor in an error."""
    if name not in BY_NAME:
        raise UnsupportedError(f"{where}: unknown dtype {name!r}; known are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def dtype_of_torch(name: str, where: str) -> DType:
    """Returns the dtype with this torch name (`bfloat16`, `torch.bfloat16`)."""
    dtype = BY_TORCH_NAME.get(name.removeprefix("torch."))
    if dtype is None:
        raise UnsupportedError(
            f"{where}: a tensor of dtype {name} cannot be stored; known are "
            + ", ".join(BY_TORCH_NAME)
        )
    return dtype
