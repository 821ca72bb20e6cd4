"""The part of a training's folder that a target wants.

A folder of Trainer or Accelerate holds weights, an optimizer and more, each at its key. A program
that loads a model from it wants the weights, with the names of the model (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from formats.catalog import Catalog
from formats.joined import under


def wanted(catalog: Catalog, state: object) -> Catalog:
    """Returns the weights of a training's folder for a module or a dict with other keys.

    A dict with one of the folder's own keys wants the whole folder; so do an empty dict and any
    other object. Another checkpoint is returned unchanged.
    """
    if not catalog.weights:
        return catalog
    own = catalog.tree if isinstance(catalog.tree, dict) else {}
    has_other_keys = isinstance(state, Mapping) and bool(state) and not any(k in own for k in state)
    if isinstance(state, nn.Module) or has_other_keys:
        return under(catalog, catalog.weights)
    return catalog
