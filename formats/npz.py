"""Reads and writes arrays of numpy: .npz, a zip of .npy files, and a .npy file alone.

A .npy file is a magic number, a header of text and the elements
(https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). Rules:

1. A name is that of the zip's member without `.npy`. A file of one array has the name `tensor`.
2. A stored member is read by ranges, and its CRC-32 covers header and elements. A compressed member
   is decoded as a whole, so it has at most `chunk_bytes`.
3. Arrays of objects, text, structures and big-endian numbers are opaque values: shown, not read.
   Void elements of two bytes are bfloat16: so numpy writes the dtype of `ml_dtypes`, as of JAX.
4. numpy has no bfloat16 and no 8-bit floats: a conversion refuses them by name. Tied names and
   plain values are left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from io import BytesIO
from math import prod

from formats.catalog import (
    Catalog,
    Extent,
    FilePlan,
    FileRecord,
    Key,
    OpaqueValue,
    Outgoing,
    OutgoingTensor,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    Tree,
    check_inside,
    encode_name,
)
from formats.dtypes import DType
from formats.errors import CorruptError, FormatError, HostileError, UnsupportedError
from formats.limits import DIMENSIONS, ELEMENTS, Names
from formats.pickles.tree import BARE_TENSOR
from formats.pickles.values import NumpyArray, NumpyDType, code_of
from formats.storage import Reader
from formats.zip_plan import Member, combine, zip_parts
from formats.zip_records import Archive, Compressed
from sharding.errors import format_names
from sharding.layout import Box, Piece

NPZ, NPY = "npz", "npy"
"""The names of the formats."""
MEMBER = ".npy"
_MAGIC = b"\x93NUMPY"
_HEADER_BYTES = 10_000
"""The longest header that numpy reads."""
_FIRST_BYTES = 256
_ALIGN_BYTES = 64
# Not by `numpy.lib.format`, to which 10 kB can take 100 ms (docs/decisions/042-libraries.md).
_HEADER = re.compile(
    r"\{\s*'descr':\s*(?:'([^']{1,40})'|\[.*\]),\s*'fortran_order':\s*(True|False),\s*"
    r"'shape':\s*\(((?:[0-9]+L?(?:, ?[0-9]+L?)*,? ?)?)\),?\s*\}\s*",
    re.DOTALL,
)


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the .npy file `name`: its header.

    Raises:
        CorruptError: the file is truncated.
        UnsupportedError: the array is none of numbers, or big-endian.
        FormatError: the header is not one of numpy.
    """
    size = reader.size(name)
    array, start = _header(lambda at, nbytes: reader.read(name, at, nbytes), size, name)
    dtype = array.dtype
    if dtype is None:
        raise UnsupportedError(f"{name}: a {array!r}, which is not read; save it as numbers")
    extent = Extent(name, start, dtype.nbytes(array.shape))
    check_inside("the array", extent, size)
    if start + extent.nbytes != size:
        raise CorruptError(
            f"{name}: {size - start - extent.nbytes} bytes follow the array: they were appended; "
            "restore it from another copy"
        )
    record = _record(BARE_TENSOR, array, dtype, extent, 0)
    files = (FileRecord(name, size),)
    return Catalog(NPY, {BARE_TENSOR: record}, TensorRef(BARE_TENSOR), files)


def read_archive(archive: Archive, size: int) -> Catalog:
    """Reads the catalog of a .npz file of `size` bytes: the zip directory and the headers.

    Raises:
        CorruptError: the file is truncated or damaged.
        HostileError: a compressed member is larger than its limit.
        FormatError: a header is not one of numpy.
    """
    tree: dict[Key, Tree] = {}
    tensors: dict[str, TensorRecord] = {}
    names = Names(archive.file, size)
    for member in archive.names:
        name = member.removesuffix(MEMBER)
        names.tensor(len(name))
        found = _member(archive, member, name)
        tree[name] = TensorRef(name) if isinstance(found, TensorRecord) else found
        if isinstance(found, TensorRecord):
            tensors[name] = found
    return Catalog(NPZ, tensors, tree, (FileRecord(archive.file, size),))


def plan(name: str, state: Outgoing) -> FilePlan:
    """Plans the .npz file `name` with the tensors of a state.

    Raises UnsupportedError if numpy lacks a dtype or a zip a name, FormatError if a name is not
    Unicode text.
    """
    if ends := [each for each in state.tensors if b"\0" in encode_name(each)]:
        raise UnsupportedError(f"{name}: a zip has no name {ends[0]!r:.200}; rename the tensor")
    lacking = [tensor for tensor in state.tensors.values() if code_of(tensor.dtype) is None]
    if lacking:
        dtypes = sorted({str(tensor.dtype) for tensor in lacking})
        raise UnsupportedError(
            f"{name}: numpy has no {', '.join(dtypes)}, of {len(lacking)} tensors "
            f"({format_names([tensor.name for tensor in lacking], 3)}); cast them "
            "(dtype='float32'), or "
            "leave them out (exclude=)",
            names=[tensor.name for tensor in lacking],
        )
    members = [
        Member(tensor.name + MEMBER, tensor, _ALIGN_BYTES, _build_header(tensor))
        for tensor in state.tensors.values()
    ]
    return FilePlan(name, zip_parts(members))


def _build_header(tensor: OutgoingTensor) -> bytes:
    """Returns the magic number and the header of an array, as `numpy.save` writes them."""
    from numpy.lib.format import write_array_header_1_0  # a reader starts without numpy

    fields = {"descr": code_of(tensor.dtype), "fortran_order": False, "shape": tensor.shape}
    write_array_header_1_0(header := BytesIO(), fields)
    return header.getvalue()


def _member(archive: Archive, member: str, name: str) -> TensorRecord | OpaqueValue:
    """Returns the tensor of a member, or the opaque value of an array that is none."""
    place = archive.place(member)
    where = f"{archive.file}: {member}"
    if isinstance(place, Compressed):
        head = place.beginning(_HEADER_BYTES + _FIRST_BYTES)
        array, start = _header(lambda at, nbytes: head[at : at + nbytes], place.raw_bytes, where)
        extent = place.extent()
    else:
        extent = place
        array, start = _header(
            lambda at, nbytes: archive.bytes_at(place.offset + at, nbytes), place.nbytes, where
        )
    dtype = array.dtype
    if dtype is None:
        return OpaqueValue(repr(array), 1 if array.is_numeric else 0)
    if start + dtype.nbytes(array.shape) != extent.nbytes:
        raise CorruptError(
            f"{where}: the member has {extent.nbytes} bytes, its header says "
            f"{start + dtype.nbytes(array.shape)}; restore the file from another copy"
        )
    if extent.chunks is None:
        return _record(name, array, dtype, _behind(archive, extent, start), 0)
    if start % dtype.itemsize:
        raise UnsupportedError(
            f"{where}: its data begin at byte {start} of compressed bytes, between two elements; "
            "load it with numpy and save it with numpy.savez"
        )
    return _record(name, array, dtype, extent, start // dtype.itemsize)


def _behind(archive: Archive, extent: Extent, start: int) -> Extent:
    """Returns the extent of the elements of a member, with the CRC-32 that they must have."""
    nbytes, checksum = extent.nbytes - start, extent.crc32
    if checksum is not None:
        header = zlib.crc32(archive.bytes_at(extent.offset, start))
        checksum ^= combine(header, 0, nbytes)
    return Extent(extent.file, extent.offset + start, nbytes, crc32=checksum)


def _record(name: str, array: NumpyArray, dtype: DType, extent: Extent, first: int) -> TensorRecord:
    piece = Piece(Box.whole(array.shape), first, array.strides)
    pieces = PieceTable([StoredPiece(piece, extent)] if piece.box else [])
    return TensorRecord(name, array.shape, dtype, pieces)


def _header(read_at: Callable[[int, int], bytes], size: int, where: str) -> tuple[NumpyArray, int]:
    """Returns an array without its elements, and the place of their first byte."""
    data = read_at(0, min(size, _FIRST_BYTES))
    wide = 4 if data[6:7] > b"\x01" else 2
    start = 8 + wide + int.from_bytes(data[8 : 8 + wide], "little")
    if data[:6] != _MAGIC or data[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise FormatError(f"{where}: not a .npy file of version 1 to 3")
    if start > size or start - 8 - wide > _HEADER_BYTES:
        raise CorruptError(
            f"{where}: its header ends at byte {start}, the file has {size}: it was truncated; "
            "restore it from another copy"
        )
    data = data if len(data) >= start else read_at(0, start)
    text = data[8 + wide : start].decode("latin-1")
    found = _HEADER.fullmatch(text)
    if found is None:
        raise FormatError(f"{where}: its header is not one of numpy: {text!r:.200}")
    sizes = [each.strip(" L") for each in found[3].split(",")]
    return _make_array(found[1], found[2] == "True", [each for each in sizes if each], where), start


def _make_array(code: str | None, is_fortran: bool, sizes: list[str], where: str) -> NumpyArray:
    if len(sizes) > DIMENSIONS or any(len(each) > 20 for each in sizes):
        raise HostileError(f"{where}: an array of {len(sizes)} dimensions or an absurd shape")
    shape = tuple(map(int, sizes))
    if prod(size or 1 for size in shape) >= ELEMENTS:
        raise HostileError(f"{where}: an array of shape {shape} has absurdly many elements")
    dtype = "bfloat16" if code in ("<V2", "|V2") else code or "V"  # as ml_dtypes writes it
    return NumpyArray(shape, NumpyDType(dtype), is_fortran)
