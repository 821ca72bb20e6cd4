"""Planned files are copied from stored tensors: any sizes, any number of threads, any writer."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.opening.sources import Source, open_source
from ckpt.plan.copy_plan import CopySource, units_of
from ckpt.plan.read_plan import Limits
from ckpt.stores.local_store import LocalStore
from ckpt.transfer.copy_files import CopySizes, FileCopier
from ckpt.transfer.read import ReadPolicy
from formats.catalog import FilePlan, OutgoingTensor, Part, length_of
from formats.dtypes import BY_NAME
from formats.errors import CorruptError
from formats.safetensors.file import build
from formats.storage import Buffer
from formats.zip_plan import Member, zip_parts
from tests.formats.written import bytes_of
from tests.selection import examples, slow

KINDS = ("ckpt", "zstd", "torch", "safetensors")


def state() -> dict[str, torch.Tensor]:
    """Tensors of several sizes; in a torch.save file some are views that lie otherwise."""
    made = torch.Generator().manual_seed(0)
    wide = torch.randn(300, 70, generator=made)
    return {
        "wide": wide,
        "cut": wide[10:200, 3:40],
        "turned": wide[:150].t(),
        "many": torch.arange(60_000, dtype=torch.int32) // 7,
        "some": torch.arange(999, dtype=torch.uint8),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Source]]:
    """The state in several formats, opened."""
    root = tmp_path_factory.mktemp("sources")
    torch.save(state(), root / "torch.pt")
    ckpt.save(root / "ckpt", state())
    ckpt.save(root / "zstd", state(), compress=True)
    ckpt.convert(root / "ckpt", root / "safetensors.safetensors")
    names = dict(zip(KINDS, ("ckpt", "zstd", "torch.pt", "safetensors.safetensors"), strict=True))
    with (
        open_source(root / names["ckpt"]) as first,
        open_source(root / names["zstd"]) as second,
        open_source(root / names["torch"]) as third,
        open_source(root / names["safetensors"]) as fourth,
    ):
        yield dict(zip(KINDS, (first, second, third, fourth), strict=True))


def tensor(name: str, dtype: str | None = None) -> OutgoingTensor:
    """A tensor of the state to write, with its stream."""
    held = state()[name]
    cast = held if dtype is None else held.to(getattr(torch, dtype))
    kind = next(d for d in BY_NAME.values() if f"torch.{d.torch_name}" == str(cast.dtype))
    data = bytes(cast.contiguous().reshape(-1).view(torch.uint8).numpy()) if held.numel() else b""
    return OutgoingTensor(name, tuple(held.shape), kind, lambda: iter([memoryview(data)]))


def source_in(source: Source, plan: FilePlan) -> Callable[[str], CopySource]:
    """The source of each tensor of a plan, by name."""
    dtypes = {part.name: part.dtype for part in plan.parts if isinstance(part, OutgoingTensor)}
    return lambda name: CopySource(source.catalog.tensors[name], dtypes[name])


def sizes(workers: int, unit: int, span: int, read: int = 4096) -> CopySizes:
    policy = ReadPolicy(1, Limits(read, unit, unit, 64))
    return CopySizes(workers, unit, policy, span, thread_bytes=0)


class InOrder:
    """A writer that keeps a file in memory and takes its bytes in order only."""

    url = "memory"

    def __init__(self) -> None:
        self.content = bytearray()
        self.calls = 0

    @contextmanager
    def create(self, name: str) -> "Iterator[InOrder]":
        yield self

    def write(self, buffers: Iterable[Buffer]) -> None:
        self.calls += 1
        for buffer in buffers:
            self.content += buffer

    def rewrite_start(self, data: Buffer) -> None:
        self.content[: len(data)] = data


names = st.lists(st.sampled_from(list(state())), max_size=5, unique=True)


@st.composite
def plans(draw: st.DrawFn) -> FilePlan:
    """Files with literals, tensors and, in a zip, bytes that checksums decide."""
    tensors = [tensor(name, "float16" if draw(st.booleans()) else None) for name in draw(names)]
    if draw(st.booleans()):
        members = [Member(str(i), t, 64) for i, t in enumerate(tensors)]
        return FilePlan("f", [b"before", *zip_parts(members), bytes(range(256)) * 40])
    parts: list[Part] = [b"header" * draw(st.integers(0, 900))]
    return FilePlan("f", [*parts, *[part for t in tensors for part in (t, b"x")]])


@pytest.mark.thorough
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=plans(),
    kind=st.sampled_from(KINDS),
    workers=st.sampled_from([1, 3]),
    unit=st.sampled_from([1, 1 << 10, 1 << 16, 1 << 20]),
    span=st.sampled_from([8, 1 << 12, 1 << 20]),
    verify=st.booleans(),
    in_order=st.booleans(),
)
def test_a_copied_file_has_the_planned_bytes(
    sources: dict[str, Source],
    tmp_path: Path,
    plan: FilePlan,
    kind: str,
    workers: int,
    unit: int,
    span: int,
    verify: bool,
    in_order: bool,
) -> None:
    expected = b"".join(bytes_of(plan))
    unit, span = max(unit, len(expected) >> 8), max(span, len(expected) >> 8)
    source, progress = sources[kind], list[int]()
    checked = "all" if verify else False
    chosen = sizes(workers, unit, span)
    find = source_in(source, plan)
    copier = FileCopier(source.store, find, checked, progress.append, chosen)
    if in_order:
        memory = InOrder()
        copier.write(memory, [plan])
        assert bytes(memory.content) == expected
    else:
        copier.write(LocalStore(tmp_path), [plan])
        assert (tmp_path / "f").read_bytes() == expected
    stored = [find(p.name).record for p in plan.parts if isinstance(p, OutgoingTensor)]
    assert sum(progress) == sum(record.nbytes for record in stored)


@pytest.mark.thorough
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(), kind=st.sampled_from(KINDS), unit=st.sampled_from([64, 1 << 12, 1 << 18]))
def test_units_lie_end_to_end_and_no_byte_has_two_origins(
    sources: dict[str, Source], plan: FilePlan, kind: str, unit: int
) -> None:
    limits = Limits(4096, unit, unit, 64)
    found = list(units_of(plan, source_in(sources[kind], plan), unit, 1 << 12, True, limits))
    assert [one.number for one in found] == list(range(len(found)))
    assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(found))
    assert sum(one.nbytes for one in found) == sum(map(length_of, plan.parts))
    for one in found:
        parts = [(at, len(data)) for at, data in one.literals]
        parts += [(at, late.nbytes) for at, _, late in one.late]
        parts += [(run.at, run.nbytes) for run in one.runs]
        end = 0
        for at, nbytes in sorted(part for part in parts if part[1]):
            assert at == end
            end += nbytes
        assert end == one.nbytes
        largest = max((late.nbytes for _, _, late in one.late), default=0)
        assert one.span is not None or one.nbytes < 2 * max(unit, 1 << 16) + largest


@pytest.mark.thorough
def test_small_tensors_and_the_bytes_between_them_are_written_together(
    sources: dict[str, Source],
) -> None:
    plan = FilePlan("f", [part for _ in range(500) for part in (b"between", tensor("some"))])
    memory = InOrder()
    source = sources["ckpt"]
    FileCopier(source.store, source_in(source, plan), "all").write(memory, [plan])
    assert bytes(memory.content) == b"".join(bytes_of(plan))
    assert memory.calls == 1


class Failing(InOrder):
    """A file that takes bytes at any place, until one write fails as on a full disk."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after
        self._lock = threading.Lock()

    def write_at(self, offset: int, data: Buffer) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise OSError(28, "No space left on device")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("after", [0, 3])
def test_a_write_that_fails_in_one_thread_ends_all_of_them(
    sources: dict[str, Source], after: int
) -> None:
    plan = FilePlan("f", zip_parts([Member(name, tensor(name)) for name in state()]))
    source = sources["ckpt"]
    copier = FileCopier(
        source.store, source_in(source, plan), "all", None, sizes(4, 1 << 12, 1 << 12)
    )
    with pytest.raises(OSError, match="No space left"):
        copier.write(Failing(after), [plan])
    assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-copy")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("in_order", [False, True])
def test_a_damaged_source_is_an_error_and_no_file_appears(tmp_path: Path, in_order: bool) -> None:
    torch.save(state(), tmp_path / "m.pt")
    content = bytearray((tmp_path / "m.pt").read_bytes())
    with open_source(tmp_path / "m.pt") as source:
        (stored,) = source.catalog.tensors["many"].pieces
        content[stored.extent.offset + stored.extent.nbytes - 5] ^= 1
        (tmp_path / "m.pt").write_bytes(content)
    with open_source(tmp_path / "m.pt") as source:
        plan = FilePlan("f", [tensor(name) for name in ("some", "many", "wide")])
        copier = FileCopier(
            source.store, source_in(source, plan), "all", None, sizes(3, 1 << 12, 1 << 12)
        )
        writer = InOrder() if in_order else LocalStore(tmp_path / "out")
        with pytest.raises(CorruptError, match=r"m\.pt: many: bytes"):
            copier.write(writer, [plan])
    assert os.listdir(tmp_path / "out") == [] if not in_order else True


@pytest.mark.thorough
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="no clear_refs, by which Linux resets the peak of memory",
)
@pytest.mark.parametrize("name", ["c.safetensors", slow("c.pt"), slow("c"), "zstd"])
def test_memory_and_writes_do_not_grow_with_a_tensor(tmp_path: Path, name: str) -> None:
    mib = 160
    header = build([("w", "F32", (mib << 18,), mib << 20)], {})
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + (mib << 20))  # zeros that take no place
    ckpt.convert(tmp_path / "m.safetensors", tmp_path / "warm.pt", include="w")
    Path("/proc/self/clear_refs").write_text("5")
    before, calls = status("VmRSS"), write_calls()
    ckpt.convert(tmp_path / "m.safetensors", tmp_path / name, compress=name == "zstd")
    assert status("VmHWM") - before < (32 << 20) * (2 if name == "zstd" else 1)
    assert write_calls() - calls <= mib + 20


def llama_405b() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of Llama 3.1 405 B."""
    yield from (("model.embed_tokens.weight", (128256, 16384)), ("lm_head.weight", (128256, 16384)))
    yield "model.norm.weight", (16384,)
    for layer in range(126):
        rows = {"q": 16384, "k": 1024, "v": 1024, "o": 16384}
        for name, size in rows.items():
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", (size, 16384)
        for name, shape in {
            "gate": (53248, 16384),
            "up": (53248, 16384),
            "down": (16384, 53248),
        }.items():
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", shape
        for name in ("input", "post_attention"):
            yield f"model.layers.{layer}.{name}_layernorm.weight", (16384,)


@pytest.mark.thorough
def test_405_billion_parameters_are_planned_from_their_headers(tmp_path: Path) -> None:
    tensors = [(name, "BF16", shape, 2 * prod(shape)) for name, shape in llama_405b()]
    for at in range(0, len(tensors), 6):  # zeros that take no place
        with (tmp_path / f"model-{at // 6:05d}-of-00190.safetensors").open("wb") as file:
            file.write(header := build(tensors[at : at + 6], {}))
            file.truncate(len(header) + sum(one[3] for one in tensors[at : at + 6]))
    weights = {
        name: f"model-{at // 6:05d}-of-00190.safetensors" for at, (name, *_) in enumerate(tensors)
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    config = {"model_type": "llama", "num_attention_heads": 128, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = status("VmRSS")
    report = ckpt.convert(
        tmp_path, tmp_path / "m", to="dcp", mapping="auto-hf-megatron", dry_run=True
    )
    plan = report.plan
    assert plan is not None
    assert plan.written_bytes == plan.read_bytes == 2 * 405_853_388_800
    assert plan.memory_bytes < 100 << 20
    assert status("VmRSS") - before < 100 << 20
    assert not (tmp_path / "m").exists()


def status(key: str) -> int:
    """A figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def write_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw:"))
