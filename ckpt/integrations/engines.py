"""vLLM and SGLang: weights as the pairs of a name and a tensor that their engines load.

    weights = EngineWeights(url, select="model", device="cuda")
    loaded = model.load_weights(weights)           # vLLM, in a method of each worker
    print(weights.version, weights.identity)

    for pairs in EngineWeights(url, select="model", device="cuda").buckets():
        engine.update_weights_from_tensor(pairs, flush_cache=False)   # SGLang
    engine.flush_cache()

Rules:

1. Neither library is imported. `load_weights` of their models takes an iterable of a name and a
   whole tensor; it fuses, splits and casts by itself.
2. One tensor is in memory at a time, or a bucket of them. With `held` one copy of the weights stays
   in host memory, and only the differences from the version before travel.
3. The names are those of files of Hugging Face, which the engines know. A checkpoint with names of
   a training library, whose q, k and v may be one tensor, needs a mapping: the error has it.
4. All tensors are of one version. If it is replaced meanwhile, the error comes in the middle: the
   engine has to load another version before it generates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

import ckpt
from ckpt.checking.identity import Identity, digest_of, identity_of
from ckpt.mapping.changes import Changes, MappingName, find_mapping, mapping_names
from ckpt.mapping.members import member_of
from ckpt.mapping.rules import Rule, TensorMapping
from ckpt.state.patterns import matches
from ckpt.stores.addresses import parse
from ckpt.stores.store import Options, is_live
from sharding.errors import ArgumentError

__all__ = ["EngineWeights"]

BUCKET_BYTES = 512 << 20
Pair = tuple[str, torch.Tensor]


class EngineWeights(Iterable[Pair]):
    """The weights at a path or URL, one whole tensor at a time, by the names that engines know.

    Each iteration reads the newest version of a live state anew. Communicates nothing: each rank of
    an engine reads for itself.

    >>> import ckpt, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ckpt.save(folder, {"model": {"norm.weight": torch.ones(2)}, "step": 1})
    ...     weights = EngineWeights(folder, select="model", identify=True)
    ...     list(weights), weights.identity == ckpt.id(folder, select="model")
    ([('norm.weight', tensor([1., 1.]))], True)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        select: str | None = None,
        mapping: MappingName | Sequence[MappingName] = (),
        parameters: Mapping[str, int] | None = None,
        device: str | torch.device = "cpu",
        held: MutableMapping[str, torch.Tensor] | None = None,
        identify: bool = False,
        storage_options: Options = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            url: a live state, with or without a version, or a checkpoint of any format.
            select: a key path. Only what is below it is loaded, without it in the names.
            mapping, parameters: as for `ckpt.load`, of the names below `select`.
            device: where the engine wants the tensors.
            held: a dict that the caller keeps from version to version, empty at first (rule 2).
            identify: whether to compute `identity`, at the cost of a SHA-256 of all bytes.
            storage_options: as for `ckpt.open`.
        """
        self.url = os.fspath(url)
        self.version: int | None = None
        """The version of the live state that was read last; None of other checkpoints."""
        self.identity: Identity | None = None
        """With `identify`, `ckpt.id` of the tensors that an iteration has yielded to its end."""
        changes = Changes(mapping=mapping, parameters=parameters)
        self._is_mapped, mappings = bool(changes.mappings), changes.mappings
        if select is not None:
            others = f"/(?!{re.escape(select)}\\.).*/"
            mappings = (TensorMapping(select, (Rule((select,), ("",)),), (others,)), *mappings)
        self._options: Any = {"mapping": mappings, "parameters": parameters}
        self._options["storage_options"] = storage_options
        self._device, self._held = device, held
        self._identify = identify

    def __iter__(self) -> Iterator[Pair]:
        """Yields each name with its whole tensor. Raises as `ckpt.open`, and rule 3's error."""
        self.identity, digests = None, dict[str, str]()
        for name, tensor in self._read():
            if self._identify:
                digests[name] = digest_of(tensor)
            yield name, tensor.to(self._device)
            del tensor  # before the next one is read
        self.identity = identity_of(digests) if self._identify else None

    def buckets(self, nbytes: int = BUCKET_BYTES) -> Iterator[list[Pair]]:
        """Yields the pairs in lists of at most `nbytes`, or of one larger tensor."""
        found: list[Pair] = []
        for name, tensor in self:
            if found and sum(member.nbytes for _, member in found) + tensor.nbytes > nbytes:
                yield found
                found = []
            found.append((name, tensor))
        if found:
            yield found

    def _read(self) -> Iterator[Pair]:
        with ckpt.open(self.url, **self._options) as checkpoint:
            self.version, names = checkpoint.version, [*checkpoint]
            if not self._is_mapped:
                _check_names(names)
            if self._held is None:
                for name in names:
                    yield name, checkpoint[name][...]
                return
            for name in names:
                like, buffer = checkpoint[name], self._held.get(name)
                if buffer is None or (buffer.shape, buffer.dtype) != (like.shape, like.dtype):
                    self._held[name] = torch.empty(like.shape, dtype=like.dtype)
            url = self.url
            if is_live(url) and self.version is not None:
                url = str(parse(url).at(self.version))
            target = {name: self._held[name] for name in names}
            ckpt.load(url, target, group="self", **self._options)
        yield from target.items()


def _check_names(names: Sequence[str]) -> None:
    """Raises ArgumentError for names that a mapping that ships turns into those of Hugging Face."""
    known = (find_mapping(title) for title in mapping_names() if title.endswith("-hf"))
    if fitting := [mapping for mapping in known if mapping.strict and _reshapes(mapping, names)]:
        titles = " or ".join(repr(mapping.name) for mapping in fitting)
        sizes = ", ".join(f"{size!r}: NUMBER" for size in fitting[0].parameters)
        raise ArgumentError(
            f"{names[0]} and the other names are those of a training library, which may have q, k "
            "and v, or gate and up, in one tensor, and load_weights takes those of Hugging Face: "
            f"pass mapping={titles}" + (f", parameters={{{sizes}}}" if sizes else "")
        )


def _reshapes(mapping: TensorMapping, names: Sequence[str]) -> bool:
    """Whether a mapping names all of these, and makes other tensors of some."""
    found = False
    for name in names:
        rule = next((rule for rule in mapping.rules if member_of(rule, name) is not None), None)
        if rule is None and not any(matches(pattern, name) for pattern in mapping.exclude):
            return False
        found |= rule is not None and rule.rearrange is not None
    return found
