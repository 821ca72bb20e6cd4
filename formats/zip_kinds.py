"""Reads a zip by the format whose records it has: of torch.save, TorchScript or numpy."""

from __future__ import annotations

from formats import npz, torch_save
from formats.catalog import Catalog
from formats.errors import ForeignFileError
from formats.magic import zip_kind
from formats.storage import Reader
from formats.zip_records import Archive


def read(reader: Reader, name: str) -> Catalog:
    """Reads the catalog of the zip `name`. Raises as the reader of its format does.

    Raises ForeignFileError if the zip is not of a format that is read.
    """
    archive, size = Archive(reader, name, is_torch=False), reader.size(name)
    kind = zip_kind(archive.names)
    if kind is None:
        archive.enter()
        return torch_save.read_archive(archive, size)
    if kind.reader:
        return npz.read_archive(archive, size)
    raise ForeignFileError(name, kind.name, kind.advice)
