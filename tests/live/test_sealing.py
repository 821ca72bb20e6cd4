"""The shard file around a part in memory: the bytes that a save to a disk writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.live.process import seal
from ckpt.plan.save_plan import SavePlan, WriteItem
from ckpt.stores.local_store import LocalStore
from ckpt.transfer.write_job import (
    STEP_BYTES,
    call_message,
    make_sealed,
    read_call,
)
from formats.catalog import OutgoingTensor
from formats.dtypes import dtype_named
from formats.native.shard import CHUNK_BYTES
from formats.native.shard_writer import write_shard

DTYPES = [dtype_named(name, "w") for name in ("F64", "C128", "BF16", "I8", "BOOL")]


@st.composite
def plans(draw: st.DrawFn) -> SavePlan:
    """Parts of tensors of all element sizes, some longer than a chunk, some empty."""
    found = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 20_000)), max_size=6))
    found.sort(key=lambda one: -one[0].itemsize)
    items, at = [], 0
    for number, (dtype, count) in enumerate(found):
        items.append(WriteItem(f"w{number}", number, dtype, 0, count, (count,), at))
        at += items[-1].nbytes
    return SavePlan(tuple(items))


def tensors_of(plan: SavePlan, data: memoryview) -> list[OutgoingTensor]:
    """The same parts as streams."""

    def blocks(item: WriteItem) -> Iterator[memoryview]:
        yield data[item.offset : item.offset + item.nbytes]

    return [
        OutgoingTensor(item.name, item.shape, item.dtype, lambda item=item: blocks(item))  # type: ignore[misc]
        for item in plan.items
    ]


@given(plan=plans(), seed=st.integers(0, 255))
def test_a_sealed_part_has_the_bytes_of_a_written_file(
    plan: SavePlan, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = memoryview(bytes((seed + at * 7) % 251 for at in range(256)) * (plan.nbytes // 256 + 1))
    folder = tmp_path_factory.mktemp("shards", numbered=True)
    with LocalStore(str(folder)) as store, store.create("a.safetensors") as file:
        written = write_shard(file, tensors_of(plan, data))
    told: list[int] = []
    made = make_sealed(plan.items, data, told.append)
    whole = Path(folder, "a.safetensors").read_bytes()
    assert made.header + bytes(data[: plan.nbytes]) + made.table == whole
    assert made.summary == written
    assert told == sorted(told)
    assert told[-1] == plan.nbytes


def test_a_part_is_hashed_in_steps_that_end_with_chunks() -> None:
    assert STEP_BYTES % CHUNK_BYTES == 0
    dtype = dtype_named("U8", "w")
    nbytes = STEP_BYTES + CHUNK_BYTES + 1
    item = WriteItem("w", 0, dtype, 0, nbytes, (nbytes,), 0)
    told: list[int] = []
    made = make_sealed([item], memoryview(bytes(nbytes)), told.append)
    assert told == [0, STEP_BYTES, nbytes]
    assert len(made.table) == 20 * -(-nbytes // CHUNK_BYTES)


@given(plan=plans())
def test_a_plan_survives_the_message_of_a_job(plan: SavePlan) -> None:
    message = call_message("ckpt.live.process:seal", {"plan": plan})
    function, fields = read_call(message)
    assert function is seal
    assert fields["plan"] == plan
