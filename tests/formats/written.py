"""Writes planned files part by part, from the streams of their tensors."""

from collections.abc import Iterable

from formats.catalog import FilePlan, Late, length_of
from formats.storage import Writer
from formats.zip_plan import crc32


def bytes_of(plan: FilePlan) -> Iterable[bytes | memoryview]:
    """The bytes of a planned file, in blocks."""
    records = b""
    for part in plan.parts:
        if isinstance(part, bytes):
            yield part
        elif isinstance(part, Late):
            made = part.make(records)
            assert len(made) == length_of(part)
            yield made
        else:
            total = value = 0
            for block in part.blocks():
                total, value = total + len(block), crc32(block, value)
                yield block
            assert total == length_of(part)
            records += value.to_bytes(4, "little")


def write_files(writer: Writer, *plans: FilePlan) -> None:
    """Writes the files of a plan into a folder, in their order."""
    for plan in plans:
        with writer.create(plan.name) as file:
            for block in bytes_of(plan):
                file.write([block])
