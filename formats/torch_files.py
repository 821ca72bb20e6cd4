"""Files of torch.save in folders of other formats, of any age: a zip or a row of pickles."""

from __future__ import annotations

from formats import torch_legacy, torch_save
from formats.catalog import Catalog
from formats.magic import HEAD_BYTES, PICKLE, kind_of
from formats.storage import Reader


def read_torch(reader: Reader, name: str) -> Catalog:
    """Returns the catalog of a file of torch.save, of any age. Raises as its reader does."""
    head = reader.read(name, 0, min(HEAD_BYTES, reader.size(name)))
    reads = torch_legacy.read if kind_of(head) is PICKLE else torch_save.read
    return reads(reader, name)
