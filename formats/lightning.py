"""The folders that Lightning's FSDP and model-parallel strategies write: DCP and `meta.pt`.

DCP holds the model and the optimizers, and `meta.pt`, a file of torch.save, the rest of the state:
the epoch, the loops, the hyperparameters. Both lie at the top, as in a `.ckpt` file of Lightning.
The names are those of lightning/fabric/strategies/fsdp.py and model_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace

from formats import dcp
from formats.catalog import Catalog
from formats.joined import Part, joined
from formats.storage import Reader
from formats.torch_files import read_torch
from formats.torch_save import weights_of_lightning


def read(reader: Reader) -> Catalog:
    """Reads the catalog of a folder: the descriptions of both parts. Raises as they do."""
    parts = [dcp.read(reader), read_torch(reader, "meta.pt")]
    found = joined("lightning", [Part((), catalog) for catalog in parts], metadata={})
    return replace(found, weights=weights_of_lightning(found.tree))
