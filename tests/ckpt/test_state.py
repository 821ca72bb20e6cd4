"""What a state may hold, what it may not, and that what is read is what was saved."""

import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from formats.native.manifest import WRITER_KEYS
from sharding.torch_versions import movable
from tests.selection import examples

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def bits(tensor: torch.Tensor) -> bytes:
    """The packed bytes of a tensor: what bit-exact means, NaNs and all."""
    whole = movable(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; of random truth values for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    nbytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def alike(one: Any, other: Any) -> bool:
    """Equal, of the same types at every place, NaN like NaN and -0.0 unlike 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            len(one) == len(other)
            and all(map(alike, one.keys(), other.keys()))
            and all(map(alike, one.values(), other.values()))
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    return repr(one) == repr(other)


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "zstd"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, compress: bool) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (7, 5), (40, 33, 9)]
    state = {
        f"{dtype}/{index}": noise(shape, dtype, index)
        for dtype in DTYPES
        for index, shape in enumerate(shapes)
    }
    ckpt.save(tmp_path, state, compress=compress)
    assert alike(ckpt.read(tmp_path), state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert alike(ckpt.load(tmp_path, target), state)


def test_tensors_of_any_strides_are_stored_by_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    waves = torch.complex(base, base + 1)
    state = {
        "transposed": base.transpose(0, 2),
        "every second": base[:, :, ::2],
        "one column": base[..., 1],
        "expanded": torch.arange(3.0).expand(5, 2, 3),
        "channels last": torch.arange(48.0)
        .reshape(1, 3, 4, 4)
        .to(memory_format=torch.channels_last),
        "conjugated": waves.conj(),
        "negated": waves.conj().imag,
        "conjugated and transposed": waves.conj().permute(2, 0, 1),
        "conjugated scalar": torch.tensor(1 + 2j).conj(),
        "part of a large one": torch.arange(1000.0)[500:503],
    }
    ckpt.save(tmp_path, state)
    found = ckpt.read(tmp_path)
    assert isinstance(found, dict)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous()


def test_targets_of_any_strides_are_filled_in_place(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    waves = torch.complex(values, values)
    ckpt.save(tmp_path, {"t": values, "s": values, "c": waves, "n": values})
    memory = torch.zeros(4, 3)
    apart = torch.zeros(6, 8)
    conjugated, negated = torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(3, 4)
    target = {
        "t": memory.T,
        "s": apart[::2, ::2],
        "c": conjugated.conj(),
        "n": torch._neg_view(negated),
    }
    ckpt.load(tmp_path, target)
    assert torch.equal(memory, values.T)
    assert torch.equal(apart[::2, ::2], values)
    assert apart[1::2].abs().sum() == 0
    assert torch.equal(target["c"], waves)
    assert torch.equal(conjugated, waves.conj())
    assert torch.equal(negated, -values)


def test_a_large_strided_tensor_is_stored_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("ckpt.state.memory"), "STAGE_BYTES", 100)
    state = {"w": torch.arange(700.0).reshape(7, 100).T, "v": torch.arange(60.0)[::2]}
    ckpt.save(tmp_path, state)
    assert alike(ckpt.read(tmp_path), {k: v.contiguous() for k, v in state.items()})


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Untied(nn.Module):
    """The same names, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)


def test_tied_weights_are_stored_once_and_load_into_tied_and_untied_targets(
    tmp_path: Path,
) -> None:
    model = Tied()
    ckpt.save(tmp_path, model)
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["embed.weight", "head.weight"]
        assert list(checkpoint.catalog.tensors) == ["embed.weight"]
        assert torch.equal(checkpoint["head.weight"][:], model.head.weight)
    found = ckpt.read(tmp_path)
    assert isinstance(found, dict)
    assert found["head.weight"] is found["embed.weight"]
    tied = ckpt.load(tmp_path, Tied())
    assert torch.equal(tied.head.weight, model.head.weight)
    assert tied.head.weight is tied.embed.weight
    untied = ckpt.load(tmp_path, Untied())
    assert torch.equal(untied.head.weight, model.head.weight)
    assert torch.equal(untied.embed.weight, model.head.weight)
    assert untied.head.weight is not untied.embed.weight


def test_a_tied_target_is_filled_by_either_of_its_names(tmp_path: Path) -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for name in ("embed.weight", "head.weight"):
        ckpt.save(tmp_path / name, {name: weight})
        assert torch.equal(ckpt.load(tmp_path / name, Tied()).embed.weight, weight)


def test_views_of_one_memory_that_differ_are_two_tensors(tmp_path: Path) -> None:
    memory = torch.arange(6.0)
    state = {"all": memory, "half": memory[:3], "square": memory.reshape(2, 3), "again": memory[:]}
    ckpt.save(tmp_path, state)
    with ckpt.open(tmp_path) as checkpoint:
        assert checkpoint.catalog.aliases == {"again": "all"}
    assert alike(ckpt.read(tmp_path), state)


def test_numpy_arrays_and_scalars_come_back_as_tensors_and_numbers(tmp_path: Path) -> None:
    read_only = np.arange(3)
    read_only.flags.writeable = False
    fields = np.zeros(3, dtype=[("a", "i1"), ("b", "f4")])
    fields["b"] = [1, 2, 3]
    state = {
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "backwards": np.arange(5)[::-1],
        "read only": read_only,
        "a field": fields["b"],
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "scalar": np.float64(0.5),
        "integer": np.int64(-3),
        "truth": np.bool_(True),
    }
    ckpt.save(tmp_path, state)
    found = ckpt.read(tmp_path)
    assert isinstance(found, dict)
    for name in ("array", "backwards", "read only", "a field", "transposed"):
        assert np.array_equal(found[name].numpy(), state[name]), name
    assert (found["scalar"], found["integer"], found["truth"]) == (0.5, -3, True)


def test_numpy_targets_are_filled_in_place_and_read_only_ones_replaced(tmp_path: Path) -> None:
    values = np.arange(6.0)
    ckpt.save(tmp_path, {"a": values, "b": values, "c": values})
    read_only = np.zeros(6)
    read_only.flags.writeable = False
    target = {"a": np.zeros(6), "b": np.zeros(6)[::-1], "c": read_only}
    here = dict(target)
    loaded = ckpt.load(tmp_path, target)
    assert loaded["a"] is here["a"]
    assert loaded["b"] is here["b"]
    assert all(np.array_equal(array, values) for array in loaded.values())
    assert not read_only.any()


def test_plain_values_come_back_equal_and_of_the_same_type(tmp_path: Path) -> None:
    state = {
        "none": None,
        "floats": [0.1, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308],
        "integers": (0, -1, 2**64, -(10**1000)),
        "truths": [True, False, 1, 0],
        "texts": ["", 'é\U0001f600\x00\n"\\', "\ud800"],
        "bytes": [b"", bytes(range(256))],
        "complex": [1 + 2j, complex(-0.0, math.nan)],
        "nest": {"a": [(), [], {}, ({"b": ((1,),)},)]},
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        3: "integer key",
        2.5: "float key",
        True: "truth key",
        None: "none key",
        "like a tag": {"$tensor": 1},
        "an empty key": {"": 1},
        "ordered": OrderedDict(z=1, a=2),
        "default": defaultdict(list, x=[1]),
    }
    expected = {**state, "size": (2, 3), "ordered": {"z": 1, "a": 2}, "default": {"x": [1]}}
    ckpt.save(tmp_path, state)
    assert alike(ckpt.read(tmp_path), expected)
    assert alike(ckpt.load(tmp_path, {}), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("state", [None, 7, [], {}, (1, [2]), "text"], ids=repr)
def test_a_state_may_be_one_plain_value(tmp_path: Path, state: object) -> None:
    ckpt.save(tmp_path, state)
    assert alike(ckpt.read(tmp_path), state)


def test_a_state_may_be_one_tensor(tmp_path: Path) -> None:
    ckpt.save(tmp_path, torch.arange(3))
    assert torch.equal(ckpt.load(tmp_path, torch.zeros(3, dtype=torch.int64)), torch.arange(3))
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["tensor"]


def test_tensors_below_empty_keys_come_back(tmp_path: Path) -> None:
    state = {"a": {"": {"w": torch.ones(2), "": torch.zeros(1)}}, "b": {"": torch.ones(3)}}
    ckpt.save(tmp_path, state)
    assert alike(ckpt.read(tmp_path), state)
    target = {"a": {"": {"w": torch.zeros(2), "": torch.ones(1)}}, "b": {"": torch.zeros(3)}}
    assert alike(ckpt.load(tmp_path, target), state)


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    generator = np.random.default_rng(6)

    def states() -> dict[str, object]:
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "generator": generator.bit_generator.state,
        }

    def draw() -> list[float]:
        return [
            float(torch.rand(())),
            random.random(),
            float(np.random.rand()),
            float(generator.random()),
        ]

    ckpt.save(tmp_path, states())
    expected = draw()
    draw()
    loaded = ckpt.load(tmp_path, states())
    torch.set_rng_state(loaded["torch"])
    random.setstate(loaded["python"])  # type: ignore[arg-type]
    np.random.set_state(loaded["numpy"])  # type: ignore[arg-type]
    generator.bit_generator.state = loaded["generator"]
    assert draw() == expected


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="."), min_size=1), inner, max_size=4
        )
        | st.dictionaries(st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(150))
@given(state=PLAIN)
def test_any_nest_of_plain_values_comes_back(
    tmp_path_factory: pytest.TempPathFactory, state: object
) -> None:
    folder = tmp_path_factory.mktemp("nest")
    ckpt.save(folder, state)
    assert alike(ckpt.read(folder), state)


class Opaque:
    """Something no checkpoint can hold."""


def cycle() -> list[object]:
    """A list that holds itself."""
    found: list[object] = []
    found.append(found)
    return found


def shared_parameters() -> dict[str, object]:
    """An optimizer with a parameter that is in none of the state's modules."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    return {"model": model, "optim": optimizer}


UNSTORABLE: dict[str, tuple[Callable[[], object], str]] = {
    "object": (lambda: {"a": [1, {"b": Opaque()}]}, r"state\['a'\]\[1\]\['b'\]: a .*Opaque"),
    "lambda": (lambda: {"f": lambda: 0}, r"state\['f'\]: a builtins.function"),
    "set": (lambda: {"a": ({Opaque()},)}, r"state\['a'\]\[0\]\[0\]: a .*Opaque"),
    "class": (lambda: {"a": nn.Linear}, r"state\['a'\]: a builtins.type"),
    "key": (lambda: {"a": {(1, (2,)): 3}}, r"state\['a'\]: the key .* of type tuple"),
    "stranger": (shared_parameters, "parameter 2 of shape .* belongs to no module"),
    "tensor names": (
        lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        r"state\['a.b'\] and state\['a'\]\['b'\] both have the name 'a.b'",
    ),
    "key names": (lambda: {1: torch.ones(1), "1": torch.ones(1)}, "both have the name '1'"),
    "value names": (lambda: {"a.b": 1, "a": {"b": 2}}, "two entries .* the name 'a.b'"),
    "list names": (lambda: {"a.0": 1, "a": [2, torch.ones(1)]}, "two entries .* the name 'a.0'"),
    "reserved": (lambda: {"__chunks__": torch.ones(1)}, r"state\['__chunks__'\]: no tensor"),
    "borrowed": (lambda: {"__borrowed__": torch.ones(1)}, r"state\['__borrowed__'\]: no tensor"),
    "deltas": (lambda: {"__deltas__": torch.ones(1)}, r"state\['__deltas__'\]: no tensor"),
    "metadata": (lambda: {"__metadata__": torch.ones(1)}, r"state\['__metadata__'\]: no tensor"),
    "empty": (lambda: {"": torch.ones(1)}, r"state\[''\]: the name of a top entry"),
    "no text": (lambda: {"\ud800": torch.ones(1)}, "no tensor can have the name"),
    "cycle": (lambda: {"a": cycle()}, r"state\['a'\]\[0\].*does it hold itself\?"),
    "nested": (
        lambda: {"a": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)},
        r"state\['a'\]: a nested tensor",
    ),
    "lazy": (lambda: {"a": nn.LazyLinear(2)}, r"state\['a'\]\['weight'\]: a lazy module"),
    "sparse": (lambda: {"a": torch.eye(2).to_sparse()}, r"state\['a'\]: a torch.sparse_coo tensor"),
    "meta": (lambda: {"a": torch.ones(1, device="meta")}, r"state\['a'\]: .* meta device"),
    "big": (lambda: {"a": 10**5000}, r"state\['a'\]: an integer of 16610 bits"),
    "big key": (lambda: {"a": {10**5000: 1}}, r"state\['a'\]: an integer of 16610 bits"),
    "dates": (
        lambda: {"a": np.zeros(2, "M8[s]")},
        r"state\['a'\]: a numpy ndarray of dtype datetime",
    ),
    "long double": (lambda: {"a": np.longdouble(1)}, r"state\['a'\]: a numpy"),
}


@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_cannot_be_stored_is_named_by_its_key_path_and_nothing_is_written(
    tmp_path: Path, case: str
) -> None:
    if case == "long double" and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("a long double is a double here")
    make, message = UNSTORABLE[case]
    with pytest.raises(ckpt.StateError, match=message):
        ckpt.save(tmp_path / "checkpoint", {"first": torch.ones(2), **make()})  # type: ignore[dict-item]
    assert not (tmp_path / "checkpoint").exists()


def test_metadata_is_text_and_nothing_is_written_where_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StateError, match=r"metadata\['run'\] is 7; give a text"):
        ckpt.save(tmp_path / "checkpoint", {}, metadata={"run": 7})  # type: ignore[dict-item]
    with pytest.raises(ckpt.ArgumentTypeError, match=r"metadata is \['run'\]; give a dict"):
        ckpt.save(tmp_path / "checkpoint", {}, metadata=["run"])  # type: ignore[arg-type]
    for key in WRITER_KEYS:  # `ckpt.latest` goes by the time
        with pytest.raises(ckpt.ArgumentError, match=f"'{key}'.*another name"):
            ckpt.save(tmp_path / "checkpoint", {}, metadata={key: "2030-01-01T00:00:00Z"})
    assert not (tmp_path / "checkpoint").exists()
    ckpt.save(tmp_path, {}, metadata={"run": "seven"})
    with ckpt.open(tmp_path) as checkpoint:
        assert checkpoint.metadata["run"] == "seven"
