"""Sums of checkpoints as one source: means, averages over steps, task vectors.

Rules:

1. A sum is a catalog like any other. Its tensors lie in files that lie nowhere: `_Sums` computes
   their bytes when they are read, in the parts in which they are asked for. A conversion thereby
   writes a sum in any format, in bounded memory and by any number of ranks.
2. An element is the sum of rounded products in the order of the sources, in float32, or in float64
   if one dtype is float64 or the caller asks for it. Parts and ranks do not change its bits.
3. Tensors without fractions, such as counters and quantised weights, have no sum: they have to be
   equal in all sources. Names and shapes have to be equal too. All this is compared for the tensors
   of a conversion before the first byte is written (`_Sums.check`).
4. Plain values, names and files beside the weights are those of the first source.
5. An adapter adds `scale * b @ a` to the tensors that it names, in the dtype of the sum. Products
   are made in tiles of whole rows. Their places, and so the bits, do not depend on parts and ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite, prod
from typing import cast

import torch

from ckpt.checking.diff import compare_elements
from ckpt.checking.elements import Tolerance, read_elements, unlike_ranges
from ckpt.errors import ArgumentError, UnsupportedError
from ckpt.mapping.model_files import adapter_config_in
from ckpt.opening.sources import Source, open_source
from ckpt.state.memory import torch_dtype
from ckpt.stores.store import Options, Store
from ckpt.transfer.read import RangeReader, bytes_of
from ckpt.transfer.record_sums import RecordSums
from formats.catalog import (
    Catalog,
    Extent,
    PieceTable,
    StoredPiece,
    TensorRecord,
    TensorRef,
    iter_leaves,
)
from formats.dtypes import DType
from formats.storage import MadeFiles
from sharding.errors import format_names, without_secrets
from sharding.layout import Box, Piece

__all__ = ["WeightedSum"]

BLOCK_BYTES = 1 << 20
"""Bytes of a tensor that are summed at once."""
SUM = "/sum/"
"""The begin of the name of a file that lies nowhere, before the name of its tensor."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of checkpoints of any formats and world sizes, each times a weight, as a source.

    `ckpt.convert(WeightedSum(...), dst)` writes it. Weights need no sum of one: `(a, b, c)` with
    `(1, 0.5, -0.5)` adds half of the difference of `b` and `c` to `a`.
    """

    urls: tuple[str, ...]
    weights: tuple[float, ...]
    in_float64: bool = False
    """Whether all sums are in float64."""
    lora: tuple[str, ...] = ()
    """Folders of LoRA adapters of PEFT, whose products are added to the sum."""

    def __post_init__(self) -> None:
        if len(self.urls) != len(self.weights) or not self.urls:
            raise ArgumentError(
                f"{len(self.urls)} checkpoints have {len(self.weights)} weights; give each one"
            )
        if not all(isfinite(weight) for weight in self.weights):
            raise ArgumentError(f"weights are {self.weights}; give finite numbers")

    @contextmanager
    def opened(self, options: Options = None) -> Iterator[Source]:
        """Opens the sources and yields their sum. Raises what `ckpt.load` raises for a source."""
        with ExitStack() as stack:
            sources = [stack.enter_context(open_source(url, options)) for url in self.urls]
            terms = [_Term.of(*pair) for pair in zip(sources, self.weights, strict=True)]
            first = sources[0]
            adapters = [stack.enter_context(open_source(url, options)) for url in self.lora]
            products: dict[str, list[_Product]] = {}
            for adapter in adapters:
                for name, product in _products_of(adapter, first.catalog).items():
                    products.setdefault(name, []).append(product)
            tensors = dict[str, TensorRecord]()
            for name, record in first.catalog.tensors.items():
                box, extent = Box.whole(record.shape), Extent(SUM + name, 0, record.nbytes)
                table = PieceTable([StoredPiece(Piece.packed(box), extent)])
                tensors[name] = record._replace(pieces=table, layout=None, strides=None)
            sums = _Sums(terms, products, self.in_float64, lru_cache(4)(_Product.factors))
            store = cast(Store, MadeFiles(first.store, sums.make))
            catalog = replace(first.catalog, tensors=tensors, bases=(), parts=())
            url, parts = " + ".join((*self.urls, *self.lora)), (*sources, *adapters)
            yield Source(url, store, catalog, parts, sums.check)


@dataclass(frozen=True, slots=True)
class _Term:
    """One source of a sum."""

    url: str
    weight: float
    engine: RangeReader
    records: Mapping[str, TensorRecord]
    """Under all names, including tied ones."""

    @classmethod
    def of(cls, source: Source, weight: float) -> _Term:
        records = dict(source.catalog.tensors)
        records |= {alias: records[name] for alias, name in source.catalog.aliases.items()}
        return cls(source.url, weight, RangeReader(source.store, RecordSums()), records)


_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
"""The name of a factor in an adapter of PEFT."""
_OTHER_KINDS = ("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config")
"""The settings of adapters that are more than a product."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""The initializations of adapters that change the weights to which the adapter adds."""
TILE_ELEMENTS = 1 << 18
"""The most elements of a product that are made at once, if a row has no more."""


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """The product that an adapter adds to a tensor: `scale * b @ a`, of shape (rows, columns)."""

    engine: RangeReader
    a: TensorRecord
    b: TensorRecord
    scale: float
    is_transposed: bool
    """Whether the tensor has the transposed product, as embeddings and GPT-2's layers do."""

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the factors: of (rows, rank) and (rank, columns)."""
        a, b = (
            _read(self.engine, record, 0, prod(record.shape)).to(dtype)
            for record in (self.a, self.b)
        )
        a, b = a.view(self.a.shape), b.view(self.b.shape)
        return (a.T.contiguous(), b.T.contiguous()) if self.is_transposed else (b, a)


def _products_of(adapter: Source, base: Catalog) -> dict[str, _Product]:
    """Returns the products of an adapter of PEFT by the names of the tensors of `base`.

    Raises UnsupportedError for another kind of adapter, and ArgumentError if a module has no tensor
    in `base`, or one of another shape.
    """
    url, config = without_secrets(adapter.url), adapter_config_in(adapter.store, adapter.catalog)
    start, more = config.get("init_lora_weights"), [key for key in _OTHER_KINDS if config.get(key)]
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        more.append(f"init_lora_weights={start}")
    records = adapter.catalog.tensors
    factors = {name: _FACTOR.fullmatch(name) for name in records}
    more += [name for name, match in factors.items() if match is None]
    if config.get("peft_type") != "LORA" or more:
        raise UnsupportedError(
            f"{url} is no plain LoRA adapter of PEFT: {format_names(more, 5) or 'peft_type'}; "
            "merge it with PEFT's merge_and_unload, and save the model"
        )
    engine, products, wrong = RangeReader(adapter.store, RecordSums()), dict[str, _Product](), []
    modules = {match[1]: bool(match[2]) for match in factors.values() if match is not None}
    named = {(match[1], match[3]): records[name] for name, match in factors.items() if match}
    tied = {*base.aliases, *base.aliases.values()}
    for module, is_embedding in modules.items():
        a, b = named.get((module, "A")), named.get((module, "B"))
        is_transposed = is_embedding or bool(config.get("fan_in_fan_out"))
        name, problem = _base_of(f"{module}.weight", [*base.tensors, *base.aliases])
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            problem = problem or "the adapter has no two matrices for it"
        elif not problem:
            shape = (a.shape[1], b.shape[0]) if is_transposed else (b.shape[0], a.shape[1])
            record = base.tensors[base.aliases.get(name, name)]
            if name in tied:
                problem = "it is tied to another name, which would change too"
            elif tuple(record.shape) != shape or a.shape[0] != b.shape[1]:
                problem = f"it has the shape {tuple(record.shape)}, and the product {shape}"
            elif not _has_sum(record.dtype) or "complex" in record.dtype.torch_name:
                problem = f"it is {record.dtype}"
        if problem or a is None or b is None:
            wrong.append(f"{module}.weight ({problem})")
            continue
        scale = _scale(config, module, a.shape[0], url)
        products[name] = _Product(engine, a, b, scale, is_transposed)
    if wrong:
        raise ArgumentError(f"{url} cannot be folded in: {format_names(wrong, 5)}", names=wrong)
    return products


def _base_of(wanted: str, names: Sequence[str]) -> tuple[str, str]:
    """Returns the one name that is `wanted` or ends with it, or an empty name and the problem.

    >>> _base_of("q.weight", ["model.q.weight", "q.bias"]), _base_of("q.weight", ["qq.weight"])
    (('model.q.weight', ''), ('', 'no tensor has this name'))
    """
    candidates = [name for name in names if name == wanted] or [
        name for name in names if name.endswith(f".{wanted}")
    ]
    if len(candidates) == 1:
        return candidates[0], ""
    return "", "several tensors have this name" if candidates else "no tensor has this name"


def _scale(config: Mapping[str, object], module: str, rank: int, url: str) -> float:
    """Returns the factor of a module's product, as PEFT computes it."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    for pattern, other in patterns.items() if isinstance(patterns, dict) else ():
        plain = pattern.removeprefix("^")
        if re.search(r"[^\w.-]", plain):
            raise UnsupportedError(
                f"{url}: alpha_pattern has the regular expression {pattern!r:.80}; give names of "
                "modules, or merge the adapter with PEFT's merge_and_unload"
            )
        if module == plain or (pattern == plain and module.endswith(f".{plain}")):
            alpha = other
            break
    if not isinstance(alpha, int | float) or rank < 1:
        raise UnsupportedError(
            f"{url}: lora_alpha of {module} is {alpha!r:.80}, and its rank {rank}"
        )
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """The sums of the tensors of several sources."""

    terms: Sequence[_Term]
    products: Mapping[str, Sequence[_Product]]
    in_float64: bool
    factors: Callable[[_Product, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    """Those of a product, which threads ask for again and again."""

    def make(self, file: str, offset: int, target: memoryview) -> None:
        """Fills memory with the bytes of a sum, from byte `offset` of its file on."""
        tensor = file.removeprefix(SUM)
        itemsize = self.terms[0].records[tensor].dtype.itemsize
        for start in range(0, len(target), BLOCK_BYTES):
            part = target[start : start + BLOCK_BYTES]
            lo, skipped = divmod(offset + start, itemsize)
            hi = -(-(offset + start + len(part)) // itemsize)
            part[:] = self._sum(tensor, lo, hi)[skipped : skipped + len(part)]

    def check(self, catalog: Catalog) -> None:
        """Raises ArgumentError unless the tensors in the tree of a catalog have a sum (rule 3)."""
        leaves = (leaf for _, leaf in iter_leaves(catalog.tree))
        records = (catalog.tensors[leaf.name] for leaf in leaves if isinstance(leaf, TensorRef))
        files = {stored.extent.file for record in records for stored in record.pieces}
        wrong = [text for file in files if (text := self._problem(file.removeprefix(SUM)))]
        if wrong:
            urls = " + ".join(without_secrets(term.url) for term in self.terms)
            raise ArgumentError(
                f"{urls} has no sum: {format_names(sorted(wrong), 5)}; give "
                "checkpoints of one model, with select= or exclude= for the parts that have a sum, "
                "and convert quantised weights to floats before"
            )

    def _problem(self, name: str) -> str:
        """Returns why a tensor has no sum; an empty text if it has one."""
        first, *others = self.terms
        record = first.records[name]
        for term in others:
            other = term.records.get(name)
            if other is None:
                return f"{name} is not in {without_secrets(term.url)}"
            if record.shape != other.shape:
                return f"{name} has the shapes {record.shape} and {other.shape}"
            if record.dtype != other.dtype and not (
                _has_sum(record.dtype) and _has_sum(other.dtype)
            ):
                return f"{name} is {record.dtype} and {other.dtype}"
            if not _has_sum(record.dtype):
                sides = first.engine, record, term.engine, other
                if compare_elements(*sides, unlike_ranges(record, other), Tolerance()).unequal:
                    return f"{name} is {record.dtype}, and its elements differ"
        return ""

    def _sum(self, tensor: str, lo: int, hi: int) -> memoryview:
        """Returns the bytes of elements `[lo, hi)`, in row-major order."""
        records = [term.records[tensor] for term in self.terms]
        if not _has_sum(records[0].dtype):  # equal in all sources
            return bytes_of(read_elements(self.terms[0].engine, records[0], lo, hi).view("u1"))
        wide = _sum_dtype([record.dtype for record in records], self.in_float64)
        total: torch.Tensor | None = None
        for term, record in zip(self.terms, records, strict=True):
            # Two roundings an element: a fused product would depend on the element's place.
            product = _read(term.engine, record, lo, hi).to(wide).mul_(term.weight)
            total = product if total is None else total.add_(product)
        assert total is not None
        for added in self.products.get(tensor, ()):
            self._add(total, added, lo)
        rounded = total.to(torch_dtype(records[0].dtype.torch_name))
        return memoryview(rounded.view(torch.uint8).numpy().data)

    def _add(self, total: torch.Tensor, product: _Product, lo: int) -> None:
        """Adds the elements of a product from `lo` on (rule 5)."""
        left, right = self.factors(product, total.dtype)
        rows = max(1, TILE_ELEMENTS // right.shape[1])
        size = rows * right.shape[1]
        for start in range(lo // size * size, lo + len(total), size):
            first = start // right.shape[1]
            tile = (left[first : first + rows].clone() @ right).mul_(product.scale).flatten()
            begin, end = max(lo, start), min(lo + len(total), start + len(tile))
            total[begin - lo : end - lo].add_(tile[begin - start : end - start])


def _read(engine: RangeReader, record: TensorRecord, lo: int, hi: int) -> torch.Tensor:
    """Returns new memory with elements `[lo, hi)`, in row-major order."""
    raw = torch.from_numpy(read_elements(engine, record, lo, hi).view("u1"))
    return raw.view(torch_dtype(record.dtype.torch_name))


def _has_sum(dtype: DType) -> bool:
    name = dtype.torch_name  # of some an element has several numbers, or only an exponent
    is_one = "_x2" not in name and "e8m0" not in name
    return name.startswith(("float", "bfloat", "complex")) and is_one


def _sum_dtype(dtypes: Sequence[DType], in_float64: bool) -> torch.dtype:
    names = {dtype.torch_name for dtype in dtypes}
    wide = in_float64 or bool(names & {"float64", "complex128"})
    if any(name.startswith("complex") for name in names):
        return torch.complex128 if wide else torch.complex64
    return torch.float64 if wide else torch.float32
