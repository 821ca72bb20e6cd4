"""A load plan is a value: printed, compared and computed without memory, ranks or files."""

from math import prod

from ckpt.plan.load_plan import LoadItem, LoadPlan, LoadPolicy, PeerPieces, plan_load
from formats.catalog import Catalog, Extent, PieceTable, StoredPiece, TensorRecord
from formats.dtypes import BY_NAME
from sharding.layout import Box, Layout, Mesh, Piece, Shard

WORLD = Mesh.grid(("world",), (2,))
F32 = BY_NAME["F32"]


def catalog(*shapes: tuple[int, ...]) -> Catalog:
    """Tensors `t0`, `t1` … end to end in one file."""
    records, at = {}, 0
    for number, shape in enumerate(shapes):
        nbytes = 4 * prod(shape)
        stored = StoredPiece(Piece.packed(Box.whole(shape)), Extent("file", at, nbytes))
        records[f"t{number}"] = TensorRecord(f"t{number}", shape, F32, PieceTable([stored]))
        at += nbytes
    return Catalog("safetensors", records, {}, ())


def planned(rank: int, policy: LoadPolicy, is_direct: bool = True) -> LoadPlan:
    shapes = ((8, 1024), (3,))
    items = [
        LoadItem(f"own{i}", f"t{i}", i, Layout.replicated(shape, 2), shape, is_direct)
        for i, shape in enumerate(shapes)
    ]
    return plan_load(items, catalog(*shapes), WORLD, rank, policy)


def test_equal_arguments_give_equal_plans_that_print() -> None:
    plan = planned(0, LoadPolicy(1 << 20))
    assert plan == planned(0, LoadPolicy(1 << 20))
    assert repr(plan) == repr(planned(0, LoadPolicy(1 << 20)))
    assert plan.names == ("own0", "own1")
    assert (plan.nbytes, plan.fingerprint) == (4 * (8 * 1024 + 3), 0)
    assert [read.target for read in plan.reads] == [0, 1]


def test_replicas_that_exchange_read_each_byte_once_and_agree_on_the_fingerprint() -> None:
    policy = LoadPolicy(1 << 20, exchange=True)
    first, second = planned(0, policy), planned(1, policy)
    assert first.nbytes + second.nbytes == 4 * (8 * 1024 + 3)
    assert first.fingerprint == second.fingerprint != 0
    assert [move.name for move in first.exchanges] == ["own0", "own1"]


def test_a_staged_tensor_is_read_in_rows_that_fit_the_policy() -> None:
    plan = planned(0, LoadPolicy(3 * 4096), is_direct=False)
    stages = [read.stage for read in plan.reads]
    assert [(s.lo, s.shape, s.nbytes) for s in stages if s is not None] == [
        (0, (3, 1024), 3 * 4096),
        (3, (3, 1024), 3 * 4096),
        (6, (2, 1024), 2 * 4096),
        (0, (3,), 12),
    ]
    assert plan.nbytes == 4 * (8 * 1024 + 3)


def test_tensors_in_the_memory_of_ranks_are_moved_in_batches_and_not_read() -> None:
    layout = Layout((6, 2), WORLD, (Shard(0),))
    records = {f"t{i}": TensorRecord(f"t{i}", (6, 2), F32, PeerPieces(layout)) for i in range(3)}
    items = [LoadItem(f"t{i}", f"t{i}", i, Layout.single((6, 2)), (6, 2), True) for i in range(3)]
    held = Catalog("memory", records, {}, ())
    plan = plan_load(items, held, WORLD, 0, LoadPolicy(0, move_bytes=2 * 48))
    assert plan.reads == ()
    assert [[move.name for move in batch] for batch in plan.peer_moves] == [["t0", "t1"], ["t2"]]
    assert plan.peer_moves[0][0].source == (0, 6)
    assert [stored.piece.box.lo for stored in PeerPieces(layout)] == [(0, 0), (3, 0)]
