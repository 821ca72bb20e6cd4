"""The mappings that ship: `MODEL-FROM-TO`, each as one file that is read in both directions."""

from __future__ import annotations

from importlib.resources import files

from ckpt.mapping.rules import TensorMapping, parse_mapping
from sharding.errors import ArgumentError

FOLDER = files(__package__).joinpath("families")


def known_names() -> tuple[str, ...]:
    """Returns the names of the mappings, both directions of each, sorted."""
    return tuple(sorted(_names()))


def known_mapping(name: str) -> TensorMapping:
    """Returns the mapping with this name.

    Raises:
        ArgumentError: no mapping has this name; the message lists them.
    """
    found = _names().get(name)
    if found is None:
        raise ArgumentError(
            f"{name!r} is no mapping and no file; the mappings are {', '.join(known_names())}"
        )
    file, is_inverse = found
    text = FOLDER.joinpath(file).read_text(encoding="utf-8")
    mapping = parse_mapping(text, file.removesuffix(".toml"))
    return mapping.inverse(name) if is_inverse else mapping


def _names() -> dict[str, tuple[str, bool]]:
    """Returns the file of each name, and whether the name is that of the inverse.

    `llama-hf-megatron.toml` is also `llama-megatron-hf`.
    """
    found: dict[str, tuple[str, bool]] = {}
    for place in FOLDER.iterdir():
        stem, ending = place.name.rpartition(".")[::2]
        if ending == "toml":
            model, source, target = stem.split("-")
            found[stem] = place.name, False
            found[f"{model}-{target}-{source}"] = place.name, True
    return found
