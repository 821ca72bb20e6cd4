"""Where parameters lie in the full buffer and in the shards: properties, torch as the oracle."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.engine.parameter import (
    ChunkPacking,
    FlatPacking,
    Slot,
    UnshardedBuffer,
    pack,
    plain,
)
from sharding.engine.reduction import predivide_factor
from sharding.layout.box import chunk

SIZES = st.integers(1, 9)
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def packings(draw: st.DrawFn) -> ChunkPacking:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    dims = [draw(st.integers(0, max(0, len(shape) - 1))) for shape in shapes]
    slots = pack(shapes, dims, draw(st.sampled_from([1, 2, 16])))
    return ChunkPacking(slots, draw(SIZES))


@given(st.integers(0, 40), SIZES)
def test_chunks_are_those_of_torch(rows: int, size: int) -> None:
    chunks = torch.arange(rows).chunk(size)
    for rank in range(size):
        lo, hi = chunk(rows, size, rank)
        mine = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(lo, hi)) == mine


@given(packings())
def test_slots_follow_each_other_without_overlap(packing: ChunkPacking) -> None:
    end = 0
    for slot in packing.slots:
        assert slot.at >= end
        end = slot.at + slot.numel
        assert prod(slot.arrived_shape) == slot.numel == prod(slot.shape)
        assert slot.rows == slot.arrived_shape[0]
    assert packing.numel == end


@given(packings())
def test_the_spans_of_all_ranks_tile_every_slot(packing: ChunkPacking) -> None:
    of_ranks = [packing.spans(rank) for rank in range(packing.size)]
    for index, slot in enumerate(packing.slots):
        spans = [spans[index] for spans in of_ranks]
        if not slot.shape:  # every rank has all of it
            assert spans == [(slot.at, slot.at + 1)] * packing.size
            continue
        at = slot.at
        for lo, hi in spans:
            assert lo == at
            assert lo <= hi
            at = hi
        assert at == slot.at + slot.numel


@given(packings())
def test_a_span_is_what_torch_chunk_gives_of_the_parameter(packing: ChunkPacking) -> None:
    for index, slot in enumerate(packing.slots):
        if not slot.shape:
            continue
        parameter = torch.arange(slot.at, slot.at + slot.numel)
        parameter = parameter.view(slot.arrived_shape).movedim(0, slot.dim)
        assert parameter.shape == slot.shape
        chunks = parameter.chunk(packing.size, slot.dim) if slot.numel else ()
        for rank in range(packing.size):
            lo, hi = packing.spans(rank)[index]
            mine = chunks[rank] if rank < len(chunks) else parameter.narrow(slot.dim, 0, 0)
            assert mine.movedim(slot.dim, 0).flatten().tolist() == list(range(lo, hi))


@given(st.lists(SHAPES, min_size=1, max_size=6), st.sampled_from([1, 4, 16, 64]))
def test_slots_begin_at_multiples(shapes: list[tuple[int, ...]], align: int) -> None:
    slots = pack(shapes, [0] * len(shapes), align)
    assert [slot.shape for slot in slots] == shapes
    assert all(slot.at % align == 0 for slot in slots)
    for slot, following in pairwise(slots):
        assert 0 <= following.at - slot.at - slot.numel < align


@given(packings())
def test_flat_shards_are_equal_parts_of_the_padded_buffer(packing: ChunkPacking) -> None:
    flat = FlatPacking(packing.slots, packing.size)
    spans = [span for rank in range(flat.size) for span in flat.spans(rank)]
    assert [hi - lo for lo, hi in spans] == [flat.shard_numel] * flat.size
    assert spans[0][0] == 0
    assert all(hi == lo for (_, hi), (lo, _) in pairwise(spans))
    assert spans[-1][1] == flat.numel
    assert 0 <= flat.numel - packing.numel < flat.size


@given(packings())
def test_the_pieces_of_a_flat_parameter_tile_it_in_rank_order(packing: ChunkPacking) -> None:
    flat = FlatPacking(packing.slots, packing.size)
    for index, slot in enumerate(flat.slots):
        at = 0
        for rank in range(flat.size):
            first, last = flat.piece(index, rank)
            if first == last:
                continue
            assert first == at
            [(lo, hi)] = flat.spans(rank)
            assert lo <= slot.at + first < slot.at + last <= hi
            at = last
        assert at == slot.numel


@given(packings())
def test_leaves_are_views_of_their_slots(packing: ChunkPacking) -> None:
    cpu = torch.device("cpu")
    buffer = UnshardedBuffer(packing.slots, packing.numel, torch.float64, cpu, plain)
    buffer.raw.copy_(torch.arange(packing.numel))
    for rank, parts in enumerate(buffer.places(packing)):
        for part, (lo, hi) in zip(parts, packing.spans(rank), strict=True):
            assert part.tolist() == list(range(lo, hi))
    buffer.set_row_major()
    for slot, leaf in zip(packing.slots, buffer.leaves, strict=True):
        assert leaf.shape == slot.shape
        assert leaf.is_contiguous()
        assert leaf._version == 0  # what fills the buffer is not seen
        arrived = leaf.movedim(slot.dim, 0) if slot.shape else leaf
        assert arrived.flatten().tolist() == list(range(slot.at, slot.at + slot.numel))


@given(packings(), st.booleans(), st.integers(8, 400))
def test_a_buffer_in_slabs_has_the_elements_of_one_in_one_piece(
    chunks: ChunkPacking, is_flat: bool, slab_bytes: int
) -> None:
    packing = FlatPacking(chunks.slots, chunks.size) if is_flat else chunks
    cpu = torch.device("cpu")
    whole = UnshardedBuffer.of(packing.slots, packing.numel, torch.float64, cpu)
    whole.raw.copy_(torch.arange(packing.numel))
    buffer = UnshardedBuffer(
        packing.slots, packing.numel, torch.float64, cpu, plain, slab_bytes=slab_bytes
    )
    for rank, places in enumerate(buffer.places(packing)):
        spans = packing.spans(rank)
        given_spans = [whole.raw[lo:hi] for lo, hi in spans]
        for place, part in zip(places, buffer.split(spans, given_spans), strict=True):
            place.copy_(part)
    for leaf, other in zip(buffer.leaves, whole.leaves, strict=True):
        assert torch.equal(leaf, other)
    buffer.free()
    assert buffer.nbytes == 0


def test_a_buffer_is_emptied_and_filled_in_the_same_storage() -> None:
    slots = pack([(3, 2), (4,)], [0, 0])
    buffer = UnshardedBuffer(slots, 10, torch.float32, torch.device("cpu"), plain)
    matrix, vector = buffer.leaves
    for turn in range(3):
        assert buffer.nbytes == 40
        buffer.raw.fill_(turn)
        assert torch.equal(matrix, torch.full((3, 2), float(turn)))
        assert torch.equal(vector, torch.full((4,), float(turn)))
        buffer.free()
        assert buffer.nbytes == matrix.untyped_storage().nbytes() == 0
        buffer.allocate()
    over = UnshardedBuffer(
        slots, 10, torch.float32, torch.device("cpu"), plain, over=torch.arange(10.0)
    )
    over.free()
    assert over.leaves[1].tolist() == [6, 7, 8, 9]


@given(st.integers(1, 4096))
def test_the_divisor_before_summing_is_a_power_of_two_near_the_root(size: int) -> None:
    before = predivide_factor(size)
    assert int(before).bit_count() == 1
    assert before == 1 or (before / 2) ** 2 < size
    if size & (size - 1) == 0:
        assert before * before in (size, 2 * size)


@pytest.mark.parametrize(
    ("slot", "size", "spans"),
    [
        (Slot((5, 2), 0, 0), 4, [(0, 4), (4, 8), (8, 10), (10, 10)]),
        (Slot((2, 5), 1, 7), 3, [(7, 11), (11, 15), (15, 17)]),
        (Slot((0, 3), 0, 5), 2, [(5, 5), (5, 5)]),
        (Slot((3, 0), 0, 5), 2, [(5, 5), (5, 5)]),
        (Slot((), 0, 5), 2, [(5, 6), (5, 6)]),
    ],
)
def test_uneven_empty_and_zero_dimensional_slots(
    slot: Slot, size: int, spans: list[tuple[int, int]]
) -> None:
    assert [slot.chunk(size, rank) for rank in range(size)] == spans
