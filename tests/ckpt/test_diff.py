import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt.checking.diff import diff
from ckpt.converting.convert import convert
from ckpt.errors import NotACheckpointError, StateError
from ckpt.saving.save import save
from formats.errors import CorruptError

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
OTHERS = (
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)


@pytest.fixture
def pair(tmp_path):
    """A function that saves two states and gives their comparison."""
    count = iter(range(100))

    def compare(a, b, **options):
        number = next(count)
        save(tmp_path / f"a{number}", a)
        save(tmp_path / f"b{number}", b)
        return diff(tmp_path / f"a{number}", tmp_path / f"b{number}", **options)

    return compare


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of any bits its dtype can have, NaNs and infinities among them."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape))
    raw = bytearray(random.Random(seed).randbytes(count * itemsize))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_equal_bits_are_equal_and_one_other_bit_is_found(pair, dtype):
    a = random_bits(dtype, (7, 5), 1)
    assert pair({"w": a}, {"w": a.clone()}).equal
    b = a.clone()
    b.view(torch.uint8).reshape(7, 5, -1)[3, 2, 0] ^= 1
    (found,) = pair({"w": a}, {"w": b}).tensors
    assert (found.name, found.problem) == ("w", "values")
    assert (found.elements, found.differing, found.first) == (35, 1, (3, 2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rtol", "atol"), [(0.1, 0.0), (0.0, 0.5), (0.05, 0.05)])
def test_a_tolerance_means_what_torch_means_by_it(pair, dtype, rtol, atol):
    a = torch.randn(500, generator=torch.Generator().manual_seed(3))
    b = a + 0.2 * torch.randn(500, generator=torch.Generator().manual_seed(4))
    a[7] = b[7] = a[9] = float("nan")
    a, b = a.to(dtype), b.to(dtype)
    found = pair({"w": a}, {"w": b}, rtol=rtol, atol=atol)
    wide = (a.to(torch.float64), b.to(torch.float64))
    close = torch.isclose(*wide, rtol=rtol, atol=atol, equal_nan=True)
    (values,) = found.tensors
    assert values.differing == int((~close).sum())
    assert values.first == (int((~close).nonzero()[0]),)
    assert values.max_abs == float("inf")  # a NaN on one side


def test_the_largest_differences_are_those_of_all_elements(pair):
    (found,) = pair(
        {"w": torch.tensor([1.0, 100.0, 0.0])}, {"w": torch.tensor([1.5, 101.0, 0.0])}
    ).tensors
    assert found.max_abs == 1.0
    assert found.max_rel == pytest.approx(0.5 / 1.5)
    assert ": 1 in A, 1.5 in B" in found.detail


def test_the_sign_of_zero_and_the_bits_of_a_nan_count_without_a_tolerance(pair):
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert pair({"w": nan}, {"w": nan.clone()}).equal
    (found,) = pair({"w": nan}, {"w": other}).tensors
    assert "nan (bits 7fc00001) in A, nan (bits 7fc00002) in B" in found.detail
    assert found.max_abs == 0.0
    assert not pair({"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)}).equal
    assert pair({"w": nan}, {"w": other}, atol=1e-9).equal
    assert pair({"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)}, atol=1e-9).equal


def test_infinities_are_close_to_nothing_but_themselves(pair):
    inf = torch.tensor([float("inf")])
    for other in (-inf, torch.tensor([1e30]), torch.tensor([float("nan")])):
        assert not pair({"w": inf}, {"w": other}, rtol=1.0, atol=1e30).equal
        assert not pair({"w": other}, {"w": inf}, rtol=1.0, atol=1e30).equal


@pytest.mark.parametrize(
    ("a", "b", "dtype", "difference"),
    [
        (2**62 + 1, 2**62, torch.int64, 1.0),
        (-(2**63), 2**63 - 1, torch.int64, float(2**64 - 1)),
        (2**64 - 1, 2**64 - 2, torch.uint64, 1.0),
        (-128, 127, torch.int8, 255.0),
    ],
)
def test_integers_are_subtracted_exactly(pair, a, b, dtype, difference):
    (found,) = pair(
        {"w": torch.tensor([a], dtype=dtype)}, {"w": torch.tensor([b], dtype=dtype)}
    ).tensors
    assert found.max_abs == difference
    assert f": {a} in A, {b} in B;" in found.detail


def test_complex_numbers_differ_by_their_distance(pair):
    (found,) = pair({"w": torch.tensor([0j])}, {"w": torch.tensor([3 + 4j])}).tensors
    assert found.max_abs == 5.0
    assert pair({"w": torch.tensor([0j])}, {"w": torch.tensor([3 + 4j])}, atol=5.0).equal


def test_packed_floats_are_compared_as_bits(pair):
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no packed 4-bit floats")
    a = torch.tensor([0x11, 0x22], dtype=torch.uint8)
    b = torch.tensor([0x11, 0x23], dtype=torch.uint8)
    kind = torch.float4_e2m1fn_x2
    found = pair({"w": a.view(kind)}, {"w": b.view(kind)}, atol=100.0)
    assert found.tensors[0].differing == 1
    assert ": bits 22 in A, bits 23 in B" in found.tensors[0].detail


def test_names_shapes_and_dtypes_are_compared(pair):
    a = {"w": torch.zeros(2), "x": torch.zeros(2), "gone": torch.zeros(1)}
    b = {"w": torch.zeros(3), "x": torch.zeros(2, dtype=torch.float64), "new": torch.zeros(1)}
    found = pair(a, b)
    assert (found.only_a, found.only_b) == (("gone",), ("new",))
    assert [(t.name, t.problem, t.detail) for t in found.tensors] == [
        ("w", "shape", "shape [2] in A, [3] in B"),
        ("x", "dtype", "dtype float32 in A, float64 in B"),
    ]
    assert found.compared_tensors == 0


def test_other_dtypes_can_be_compared_as_numbers(pair):
    exact = torch.tensor([1.0, 0.5, float("nan"), -0.0])
    assert pair({"w": exact}, {"w": exact.bfloat16()}, dtype=False).equal
    assert pair({"w": exact[:2]}, {"w": exact[:2].to(torch.float8_e4m3fn)}, dtype=False).equal
    assert pair({"w": torch.tensor([1, 0])}, {"w": torch.tensor([True, False])}, dtype=False).equal
    third = torch.tensor([1 / 3])
    assert not pair({"w": third}, {"w": third.bfloat16()}, dtype=False).equal
    assert pair({"w": third}, {"w": third.bfloat16()}, dtype=False, rtol=0.01).equal


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (1, 1, 1)])
def test_tensors_of_any_shape_are_compared(pair, shape):
    assert pair({"w": torch.ones(shape)}, {"w": torch.ones(shape)}).equal
    found = pair({"w": torch.ones(shape)}, {"w": torch.full(shape, 2.0)})
    assert found.equal == (0 in shape)


@pytest.mark.parametrize("block_bytes", [4, 12, 100, 1000])
def test_large_tensors_are_compared_block_by_block(pair, monkeypatch, block_bytes):
    monkeypatch.setattr(import_module("ckpt.checking.diff"), "BLOCK_BYTES", block_bytes)
    a = torch.arange(5 * 6 * 7, dtype=torch.float32).reshape(5, 6, 7)
    b = a.clone()
    b[2, 3, 4] += 1
    b[4, 5, 6] += 3
    counted = []
    (found,) = pair({"w": a}, {"w": b}, progress=counted.append).tensors
    assert (found.differing, found.first, found.max_abs) == (2, (2, 3, 4), 3.0)
    assert ": 109 in A, 110 in B;" in found.detail
    assert sum(counted) == a.nbytes


def test_one_format_is_compared_with_another(tmp_path):
    w = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    save(tmp_path / "c", {"w": w, "deep": {"v": w[::2], "z": w.bfloat16()}, "step": 3})
    for to in ("ckpt", "safetensors", "hf", "torch", "dcp"):
        convert(tmp_path / "c", tmp_path / to, to=to)
        found = diff(tmp_path / "c", tmp_path / to)
        assert found.equal, to
        assert found.compared_tensors == 3
        flat = to in ("safetensors", "hf")
        assert len(found.notes) == flat
        assert not flat or "the plain values of" in found.notes[0]


def test_elements_are_the_same_however_they_are_stored(tmp_path):
    w = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    torch.save({"w": w.T, "v": w[1:5, 2:7], "e": w[0].expand(3, 8)}, tmp_path / "strided.pt")
    save(tmp_path / "c", {"w": w.T, "v": w[1:5, 2:7], "e": w[0].expand(3, 8)}, compress=True)
    assert diff(tmp_path / "strided.pt", tmp_path / "c").equal


def test_tied_names_are_compared_under_each_name(pair):
    w, other = torch.ones(3), torch.zeros(3)
    tied = {"embed": w, "head": w}
    assert pair(tied, {"embed": w.clone(), "head": w.clone()}).equal
    found = pair(tied, {"embed": w.clone(), "head": other})
    assert [tensor.name for tensor in found.tensors] == ["head"]
    assert pair(tied, tied).compared_tensors == 1
    assert pair(tied, {"embed": w}).only_a == ("head",)


def test_plain_values_are_compared_strictly(pair):
    a = {"step": 1, "lr": 0.1, "nan": float("nan"), "flag": True, "betas": (0.9, 0.99), "x": None}
    assert pair(a, dict(a)).equal
    b = {**a, "flag": 1, "betas": (0.9, 0.95), "new": "text"}
    del b["step"]
    found = pair(a, b)
    assert [(value.name, value.a, value.b) for value in found.values] == [
        ("step", "1", None),
        ("flag", "True", "1"),
        ("betas.1", "0.99", "0.95"),
        ("new", None, "'text'"),
    ]
    assert not found.equal
    assert pair(a, b, values=False).equal


def test_a_tolerance_counts_for_plain_floats_too(pair):
    a, b = {"lr": 0.1, "z": 1 + 2j, "n": 3}, {"lr": 0.1001, "z": 1 + 2.0001j, "n": 3}
    assert len(pair(a, b).values) == 2
    assert pair(a, b, rtol=0.01).equal
    assert not pair({"n": 3}, {"n": 4}, atol=10.0).equal


def test_patterns_choose_what_is_compared(pair):
    a = {"model": {"w": torch.zeros(1), "v": torch.zeros(1)}, "step": 1}
    b = {"model": {"w": torch.zeros(1), "v": torch.ones(1)}, "step": 2}
    assert pair(a, b, include="model.*", exclude=["*.v"]).equal
    assert len(pair(a, b, include="model.*").tensors) == 1
    assert len(pair(a, b, exclude="model.*").values) == 1


def test_a_key_path_can_be_compared_with_an_exported_part(tmp_path):
    save(tmp_path / "c", {"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}})
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    assert diff(tmp_path / "c", tmp_path / "m.safetensors", select="model").equal
    assert diff(tmp_path / "m.safetensors", tmp_path / "c", select="model").equal
    with pytest.raises(ValueError, match="'teacher'"):
        diff(tmp_path / "c", tmp_path / "m.safetensors", select="teacher")


def test_damage_is_an_error_that_names_the_tensor(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(300)})
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match=r"safetensors: w: bytes"):
        diff(tmp_path / "c", tmp_path / "c", read_all=True)


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}


def save_pair(folder, placement, compress):
    """On each rank: saves a tensor as A, and with two other elements as B and C, which borrows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(700 * 230, dtype=torch.float32).reshape(700, 230)
    other = whole.clone()
    other[3, 7] = other[-1, -1] = -1.0
    for name, full, base in (("a", whole, None), ("b", other, None), ("c", other, f"{folder}/a")):
        state = {"w": distribute_tensor(full, mesh, [PLACEMENTS[placement]]), "v": full[0].clone()}
        save(f"{folder}/{name}", state, compress=compress and name != "c", base=base)


@pytest.mark.thorough
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_chunks_with_equal_checksums_are_not_read_and_the_result_is_the_same(
    clusters, tmp_path, placement, compress
):
    clusters(2).run(save_pair, str(tmp_path), placement, compress)
    for a, b in (("a", "b"), ("b", "a"), ("a", "c"), ("b", "b"), ("b", "c")):
        if compress and "c" in (a, b):
            continue
        whole = diff(tmp_path / a, tmp_path / b, read_all=True)
        found = diff(tmp_path / a, tmp_path / b)
        assert replace(found, unread_bytes=0) == whole
        assert found.unread_bytes >= (0 if compress else whole.compared_bytes // 2)
    assert diff(tmp_path / "b", tmp_path / "b").unread_bytes == 701 * 230 * 4


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.complex128]),
    shape=st.sampled_from([(), (0, 3), (100_000,), (40, 3, 1000), (1, 70_000, 1)]),
    changed=st.lists(st.integers(0, 10**6), max_size=3),
    strided=st.booleans(),
)
def test_elements_that_differ_lie_in_the_chunks_that_are_read(pair, dtype, shape, changed, strided):
    a = torch.zeros(shape, dtype=dtype)
    b = a.clone()
    for index in changed:
        if b.numel():
            b.view(-1)[index % b.numel()] += 1
    if strided and len(shape) > 1:
        a, b = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (a, b))
    whole, found = pair({"w": a}, {"w": b}, read_all=True), pair({"w": a}, {"w": b})
    assert replace(found, a="", b="", unread_bytes=0) == replace(whole, a="", b="")
    assert found.unread_bytes <= max(0, whole.compared_bytes - len(found.tensors))


def test_what_is_no_checkpoint_cannot_be_compared(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(3)})
    with pytest.raises(NotACheckpointError):
        diff(tmp_path / "c", tmp_path / "nothing")


def test_tolerances_are_not_negative(tmp_path):
    save(tmp_path / "c", {"w": torch.ones(3)})
    for wrong in ({"rtol": -1.0}, {"atol": float("nan")}):
        with pytest.raises(ValueError, match="cannot be negative"):
            diff(tmp_path / "c", tmp_path / "c", **wrong)


NESTS = (
    {"a": {0: 1}, "b": (1, 2), "c": [torch.ones(2)], "d": {"0": torch.ones(2)}, "e": {1.5: 1}},
    {"a": {"0": 1}, "b": [1, 2], "c": {"0": torch.ones(2)}, "d": (torch.ones(2),), "e": {"1.5": 1}},
)


def test_containers_and_keys_of_other_kinds_are_a_difference_of_structure(pair):
    found = pair(*NESTS)
    assert [(one.name, one.a, one.b) for one in found.structure] == [
        ("a.0", "under the key 0", "under '0'"),
        ("b", "a tuple", "a list"),
        ("c", "a list", "a dict"),
        ("d", "a dict", "a tuple"),
        ("e.1.5", "under the key 1.5", "under '1.5'"),
    ]
    assert (found.tensors, found.values, found.equal) == ((), (), False)
    assert pair(*NESTS, values=False).equal
    assert pair(NESTS[0], NESTS[0]).equal


def test_of_many_keys_of_another_kind_one_is_named(pair):
    numbers = {number: number for number in range(100)}
    (found,) = pair({"a": numbers}, {"a": {str(key): key for key in numbers}}).structure
    assert found.name == "a.0"


def test_patterns_and_a_key_path_choose_the_structure_that_is_compared(pair):
    assert [one.name for one in pair(*NESTS, include="b.*").structure] == ["b"]
    a, b = {"model": NESTS[0], "x": (1,)}, {"model": NESTS[1], "x": [1]}
    names = [one.name for one in pair(a, b, select="model").structure]
    assert names == ["a.0", "b", "c", "d", "e.1.5"]
    assert [one.name for one in pair(NESTS[0], b, select="model").structure] == names
    assert [one.name for one in pair(a, b, include="x.*").structure] == ["x"]


@pytest.mark.parametrize("to", ["ckpt", "safetensors", "hf", "torch", "dcp"])
def test_what_a_format_cannot_hold_of_a_structure_is_no_difference(tmp_path, to):
    w = torch.ones(2)
    save(tmp_path / "c", {"a": {0: w, 1: {2: 3}}, "b": [(w + 1, 4), 5], "c": (6, {7: 8})})
    convert(tmp_path / "c", tmp_path / to, to=to)
    for one, other in ((to, "c"), ("c", to), (to, to)):
        assert diff(tmp_path / one, tmp_path / other).equal


@pytest.mark.parametrize("other", [99, 1])
def test_two_values_of_one_name_are_an_error_and_not_one_of_them(tmp_path, other):
    torch.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "one.pt")
    torch.save({"a.b": other, "a": {"b": 2}}, tmp_path / "other.pt")
    torch.save({"a.b": torch.ones(1), "a": {"b": 2}}, tmp_path / "mixed.pt")
    for b in ("other.pt", "mixed.pt"):
        with pytest.raises(StateError, match=r"two entries of .*one\.pt get the name 'a\.b'"):
            diff(tmp_path / "one.pt", tmp_path / b)
    with pytest.raises(StateError, match=r"mixed\.pt get the name 'a\.b'"):
        diff(tmp_path / "mixed.pt", tmp_path / "mixed.pt")


def test_a_pattern_that_matches_nothing_is_an_error(pair):
    a, b = {"model": {"w": torch.zeros(1)}}, {"model": {"w": torch.ones(1)}, "step": 1}
    for include in ("modle.*", ["model.*", "modle.*"]):
        with pytest.raises(ValueError, match=r"'modle\.\*' matches no name; there are model"):
            pair(a, b, include=include)
    assert [one.name for one in pair(a, b, include="step").values] == ["step"]  # B has it
    with pytest.raises(ValueError, match="'step' matches no name"):
        pair(a, b, include="step", values=False)
    with pytest.raises(ValueError, match=r"all 2 names are excluded by '\*'"):
        pair(a, b, exclude="*")
    with pytest.raises(ValueError, match="exclude: 'nothing' matches no name"):
        pair(a, b, exclude=["step", "nothing"])
    assert len(pair(a, b, exclude="step").tensors) == 1  # B has it
    assert pair({}, {}).equal


def test_a_bracket_in_a_pattern_is_a_bracket(pair):
    a = {"blk[0].w": torch.zeros(1), "blk0.w": torch.zeros(1), "blk[!0]": torch.zeros(1)}
    b = {"blk[0].w": torch.ones(1), "blk0.w": torch.ones(1), "blk[!0]": torch.ones(1)}
    for pattern in ("blk[0].w", "blk[?].*", "*[0]*"):
        assert [one.name for one in pair(a, b, include=pattern).tensors] == ["blk[0].w"]
    assert [one.name for one in pair(a, b, exclude=["blk[*"]).tensors] == ["blk0.w"]


@pytest.mark.parametrize("name", ["x.gguf", "x.npz", "x.safetensors"])
def test_values_that_a_format_cannot_hold_are_no_difference(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a", {"w": torch.ones(4, 32), "lr": 0.1})
    convert(tmp_path / "a", tmp_path / name)
    for sides in ((tmp_path / "a", tmp_path / name), (tmp_path / name, tmp_path / "a")):
        found = diff(*sides)
        assert found.equal, found
        assert any("were not compared" in note for note in found.notes)
