"""The formats that a conversion writes: by which names, and what each cannot hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import Enum

from formats import gguf, npz
from formats.catalog import TypedValue, named_leaves
from formats.dcp.nest import lost
from formats.detect import ENDINGS
from formats.errors import UnsupportedError
from formats.outgoing import Outgoing
from formats.safetensors import file as safetensors_file
from sharding.errors import ArgumentError, listed
from sharding.kind import Kind
from sharding.url_secrets import without_secrets


class Format(str, Enum):
    """The formats that a conversion writes."""

    CKPT = "ckpt"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "hf"
    TORCH = "torch"
    DCP = "dcp"
    GGUF = "gguf"
    NPZ = "npz"

    @property
    def is_file(self) -> bool:
        """Whether a checkpoint of this format is one file, not a folder."""
        return self in (Format.SAFETENSORS, Format.TORCH, Format.GGUF, Format.NPZ)

    @property
    def is_of_weights(self) -> bool:
        """Whether a checkpoint of this format is the weights of a model, by its flat names.

        Of a training's folder, a conversion writes the weights alone unless `select` is given.
        """
        return self in (Format.SAFETENSORS, Format.HUGGINGFACE, Format.GGUF, Format.NPZ)


def format_of(target: str, to: str | None) -> Format:
    """Returns the format to write: `to`, or the format of the target's name."""
    if to is not None:
        try:
            return Format(to)
        except ValueError:
            known = ", ".join(f.value for f in Format)
            raise ArgumentError(f"cannot write {to!r}; known formats are {known}") from None
    name = target.lower()
    if name.endswith((".pt", ".pth", ".bin")):
        return Format.TORCH
    if name.endswith((".safetensors", ".gguf", ".npz")):
        return Format(name.rpartition(".")[2])
    _check_no_foreign_ending(target)
    return Format.CKPT


def _check_no_foreign_ending(target: str) -> None:
    """Raises ArgumentError if a name ends as files of a format that is not written."""
    ending = os.path.splitext(target.rstrip("/"))[1].lower()
    if ending in ENDINGS:
        raise ArgumentError(
            f"{without_secrets(target)} ends with {ending}, which is {ENDINGS[ending]}, and no "
            "such file is written; end it with .safetensors, .pt, .gguf or .npz, or name the "
            "folder's format (to='ckpt')"
        )


def left_out(chosen: Format, state: Outgoing) -> tuple[str, ...]:
    """Returns the key paths of values that a format cannot hold, and its metadata."""
    if chosen is Format.CKPT:
        return ()
    if chosen in (Format.SAFETENSORS, Format.HUGGINGFACE):
        return safetensors_file.left_out(state.tree)
    lacking: Iterable[str] = ()
    if chosen is Format.NPZ:
        lacking = npz.left_out(state)
    elif chosen is Format.GGUF:
        lacking = gguf.left_out(state)
    elif chosen is Format.DCP:
        lacking = (name for name, is_empty in lost(state.tree) if is_empty)
    known = gguf.METADATA if chosen is Format.GGUF else ()
    kept = (f"metadata[{key!r}]" for key in sorted(state.metadata) if key not in known)
    return (*lacking, *kept)


def check_values(chosen: Format, state: Outgoing) -> None:
    """Raises UnsupportedError for a value that only ckpt's own format can hold."""
    if chosen in (Format.TORCH, Format.DCP):
        for name, value in named_leaves(state.tree):
            if isinstance(value, TypedValue):
                raise UnsupportedError(
                    f"{name} is {value!s:.80}, and {chosen.value} has no {value.kind} that torch "
                    "loads without running code: leave it out (exclude=), store plain "
                    "values in its place, or convert to ckpt's own format"
                )


def check_any_is_left(chosen: Format, state: Outgoing, url: str, opaque: Sequence[str]) -> None:
    """Raises UnsupportedError if a format of weights would get no tensor, and `opaque` the reason.

    `opaque` has the names of objects that are shown and never made.
    """
    if chosen.is_of_weights and not state.tensors and opaque:
        raise UnsupportedError(
            f"{without_secrets(url)}: none of its tensors can be converted: {len(opaque)} objects "
            f"are shown and never made ({listed(opaque, 3)}); `ckpt inspect` says why",
            names=opaque,
        )


def became_text(chosen: Format, state: Outgoing) -> tuple[str, ...]:
    """Returns the names of dicts with keys that are text in the target, and were numbers."""
    found = lost(state.tree) if chosen is Format.DCP else ()
    return tuple(name or "the outermost" for name, is_empty in found if not is_empty)


def check_can_hold(
    chosen: Format, target: str, kind: Kind | None, ranks: int | None, compress: bool
) -> None:
    """Raises ArgumentError if a format cannot be divided or compressed as requested."""
    if compress and chosen is not Format.CKPT:
        raise ArgumentError(
            f"{without_secrets(target)} would be written as {chosen.value}, which is not "
            "compressed; only ckpt's own format is: convert to a folder with to='ckpt', "
            "or leave out compress=True"
        )
    is_whole = kind in (None, Kind.FULL) and ranks in (None, 1)
    if chosen is not Format.CKPT and not is_whole:
        raise ArgumentError(
            f"{without_secrets(target)} would be written as {chosen.value}, which has whole "
            "tensors that belong to no rank; only ckpt's own format is divided among ranks: "
            "convert to a folder with to='ckpt', or leave out kind= and world_size="
        )
