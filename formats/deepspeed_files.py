"""The files of DeepSpeed: zips of torch.save whose content is a dict, and the values in them.

A file chooses each value, so every value is checked where it is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from formats.errors import FormatError, HostileError
from formats.limits import ELEMENTS
from formats.pickle_reader import load
from formats.pickle_records import is_shape
from formats.storage import Reader
from formats.torch_tree import shown
from formats.zip_records import PICKLE, Archive

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name, in the order of their elements."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of torch.save, opened."""

    name: str
    size: int
    archive: Archive
    content: object
    pickle_bytes: int

    def part(self, *path: str) -> dict[object, object]:
        """Returns the dict at a key path. Raises FormatError if another value is there."""
        found = self.content
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
        raise self.unlike("dict", found, *path)

    def items(self, holder: Mapping[object, object], key: str) -> list[object]:
        """Returns the list of a dict. Raises FormatError if another value is there."""
        found = holder.get(key)
        if isinstance(found, list | tuple):
            return list(found)
        raise self.unlike("list", found, key)

    def unlike(self, kind: str, found: object, *path: object) -> FormatError:
        """Returns the error for a value of another kind."""
        return FormatError(
            f"{self.name}: {shown(path)} is a {type(found).__name__}, DeepSpeed stores a {kind} "
            "there"
        )


def opened(reader: Reader, name: str) -> File:
    """Opens a file and reads its pickle, no tensor. Raises as `formats.torch_save.read` does."""
    archive = Archive(reader, name)
    pickled = archive.read(PICKLE)
    return File(name, reader.size(name), archive, load(pickled, name), len(pickled))


def shapes_of(file: File, value: object, *path: object) -> Shapes:
    """Returns a table of shapes.

    Raises FormatError for another value, HostileError for more elements than torch can count.
    """
    if not isinstance(value, dict):
        raise file.unlike("table of shapes", value, *path)
    for name, shape in value.items():
        if type(name) is not str or not is_shape(shape):
            raise file.unlike("name with a shape", shape, *path, name)
        if prod(size or 1 for size in shape) >= ELEMENTS:
            raise HostileError(
                f"{file.name}: {shown((*path, name))} has more elements than torch can count"
            )
    return value


def groups_of(file: File) -> list[Shapes]:
    """Returns the shapes of the trained parameters by group; none if ZeRO is off."""
    if file.part().get("param_shapes") is None:
        return []
    groups = file.items(file.part(), "param_shapes")
    return [shapes_of(file, each, "param_shapes", at) for at, each in enumerate(groups)]
