"""Large models as names, shapes and layouts: no memory, no process group, any number of ranks.

A state is the parameters in bfloat16, and float32 masters and Adam's moments, 14 bytes a parameter.
Every description is what one rank would give of its own part: `StateSpec`, whose layouts speak of
all ranks of the mesh, as DTensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.state.state_spec import StateSpec
from formats.catalog import TensorRef, Tree
from formats.dtypes import BY_NAME
from formats.native.manifest import StoredTensor
from sharding.layout import Layout, Mesh, Placement, Replicate, Shard, StridedShard

TENSOR_PARALLEL = 8
SHARD_RANKS = 64
"""Ranks that share one copy of the model where data parallelism is hybrid (HSDP)."""
STAGES = 8

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    split: int | None
    """The dimension that tensor parallelism cuts."""
    layer: int
    """Its block; -1 before the first, the number of blocks behind the last."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its parameters."""

    name: str
    layers: int
    parameters: tuple[Parameter, ...]


def dense_70b() -> Model:
    """80 layers of width 8,192, 8 key-value heads of 128, 28,672 in between, 128,256 words."""
    width, between, words, layers = 8192, 28672, 128256, 80
    found = [Parameter("embed.weight", (words, width), 0, -1)]
    for layer in range(layers):
        found += _attention(layer, width, 1024)
        for name in ("gate", "up"):
            shape = (between, width)
            found.append(Parameter(f"layers.{layer}.mlp.{name}.weight", shape, 0, layer))
        found.append(Parameter(f"layers.{layer}.mlp.down.weight", (width, between), 1, layer))
    found += _head(words, width, layers)
    return Model("70 B dense", layers, tuple(found))


def experts_400b() -> Model:
    """48 layers of width 5,120, in every second one 128 experts of 8,192, their weights stacked."""
    width, between, words, layers, experts = 5120, 8192, 202048, 48, 128
    found = [Parameter("embed.weight", (words, width), 0, -1)]
    for layer in range(layers):
        found += _attention(layer, width, 1024)
        at = f"layers.{layer}"
        if layer % 2:
            found.append(Parameter(f"{at}.router.weight", (experts, width), None, layer))
            shapes = {"gate_up": (experts, width, 2 * between), "down": (experts, between, width)}
            found += [Parameter(f"{at}.experts.{k}", s, 0, layer) for k, s in shapes.items()]
        for name in ("gate", "up"):
            found.append(Parameter(f"{at}.mlp.{name}.weight", (between, width), 0, layer))
        found.append(Parameter(f"{at}.mlp.down.weight", (width, between), 1, layer))
    found += _head(words, width, layers)
    return Model("400 B experts", layers, tuple(found))


def thousand() -> Model:
    """1,000 matrices, each cut over all ranks."""
    shape = (16384, 64)
    return Model(
        "1,000 tensors", 1000, tuple(Parameter(f"w.{i}", shape, 0, i) for i in range(1000))
    )


def _attention(layer: int, width: int, keys: int) -> Iterator[Parameter]:
    at = f"layers.{layer}"
    shapes = {"q": (width, width), "k": (keys, width), "v": (keys, width)}
    for name, shape in shapes.items():
        yield Parameter(f"{at}.attention.{name}.weight", shape, 0, layer)
    yield Parameter(f"{at}.attention.o.weight", (width, width), 1, layer)
    for name in ("before_attention", "before_mlp"):
        yield Parameter(f"{at}.{name}.weight", (width,), None, layer)


def _head(words: int, width: int, layers: int) -> Iterator[Parameter]:
    yield Parameter("norm.weight", (width,), None, layers)
    yield Parameter("head.weight", (words, width), 0, layers)


Spread = Callable[[Parameter, int], Layout]
"""How a parameter is spread over so many ranks."""


def fsdp(parameter: Parameter, world_size: int) -> Layout:
    """Rows over all ranks."""
    return Layout(parameter.shape, Mesh.grid(("dp",), (world_size,)), (Shard(0),))


def hsdp(parameter: Parameter, world_size: int) -> Layout:
    """Rows over up to `SHARD_RANKS` ranks, replicas of that over the others."""
    sharing = min(SHARD_RANKS, world_size)
    mesh = Mesh.grid(("replicate", "shard"), (world_size // sharing, sharing))
    return Layout(parameter.shape, mesh, (Replicate(), Shard(0)))


def fsdp_tp(parameter: Parameter, world_size: int) -> Layout:
    """Tensor parallelism inside, FSDP's rows outside, as torch's `fully_shard` places them."""
    inner = min(TENSOR_PARALLEL, world_size)
    mesh = Mesh.grid(("dp", "tp"), (world_size // inner, inner))
    placements: tuple[Placement, ...] = (Shard(0), Replicate())
    if parameter.split == 0:
        placements = (StridedShard(0, inner), Shard(0))
    elif parameter.split is not None:
        placements = (Shard(0), Shard(parameter.split))
    return Layout(parameter.shape, mesh, placements)


SPREADS: dict[str, Spread] = {"FSDP": fsdp, "HSDP": hsdp, "FSDP × TP": fsdp_tp}


def whole(model: Model, spread: Spread, world_size: int) -> StateSpec:
    """The state as every rank describes it."""
    return described((p, spread(p, world_size)) for p in model.parameters)


def stages(model: Model, world_size: int, count: int = STAGES) -> list[StateSpec]:
    """The state of pipeline stages of unequal depth, each with FSDP over ranks of its own."""
    count = min(count, world_size)
    ranks = world_size // count
    # A stage in the middle has a layer more than its share; the first and the last have the ends.
    edges = [round(model.layers * (at / count) ** 1.05) for at in range(count + 1)]
    found = []
    for stage in range(count):
        first, last = edges[stage] - (stage == 0), edges[stage + 1] + (stage == count - 1)
        mesh = Mesh.grid(("dp",), (ranks,), stage * ranks)
        mine = [p for p in model.parameters if first <= p.layer < last]
        found.append(described((p, Layout(p.shape, mesh, (Shard(0),))) for p in mine))
    return found


def described(parameters: Iterator[tuple[Parameter, Layout]]) -> StateSpec:
    """Parameters, masters, moments and step counts of these layouts as one state."""
    tensors: dict[str, StoredTensor] = {}
    tree: dict[str, dict[str, Tree]] = {"model": {}, "master": {}, "optimizer": {}}
    for parameter, layout in parameters:
        name, shape = parameter.name, parameter.shape
        for part, dtype in (("model", "BF16"), ("master", "F32")):
            stored = f"{part}.{name}"
            tensors[stored] = StoredTensor(shape, BY_NAME[dtype], layout)
            tree[part][name] = TensorRef(stored)
        entries: dict[str | int | float | bool | None, Tree] = {"step": 1000.0}
        for moment in _MOMENTS:
            stored = f"optimizer.{name}.{moment}"
            tensors[stored] = StoredTensor(shape, BY_NAME["F32"], layout)
            entries[moment] = TensorRef(stored)
        tree["optimizer"][name] = entries
    return StateSpec(tensors, {}, dict(tree))
