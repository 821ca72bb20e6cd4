"""The restricted pickle reader: honest pickles read equal, hostile ones are refused and inert."""

from __future__ import annotations

import collections
import copyreg
import os
import pickle
import pickletools
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path, PurePosixPath
from struct import pack
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from formats.dtypes import BY_TORCH_NAME
from formats.errors import FormatError, HostileError, UnsupportedError
from formats.limits import INTEGER_BYTES
from formats.pickles.machine import load
from formats.pickles.records import (
    RECORDS,
    Metadata,
    MetadataIndex,
    Opaque,
    Storage,
    StoredTensor,
)
from formats.pickles.writer import Call, dump
from tests.selection import examples

DCP = "torch.distributed.checkpoint.metadata"

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())
sets = st.sets(st.text() | st.integers())


def nests(leaves: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Lists, tuples and dicts of them."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
        max_leaves=20,
    )


def pickled(*parts: bytes) -> bytes:
    """A pickle of protocol 2 put together by hand."""
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    """The opcode that pushes a text."""
    return b"X" + pack("<I", len(value)) + value.encode()


class Doing:
    """Pickles as a call of anything."""

    def __init__(self, callee: Any, *arguments: Any) -> None:
        self.call = (callee, arguments)

    def __reduce__(self) -> Any:
        return self.call


@given(nests(leaves | sets), st.integers(2, 5))
def test_plain_values_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), "file") == value


@given(nests(leaves))
def test_what_the_writer_writes_reads_equal_here_and_in_pickle(value: object) -> None:
    assert load(dump(value), "file") == value
    assert pickle.loads(dump(value)) == value


def test_the_writer_refuses_what_it_cannot_write() -> None:
    with pytest.raises(ValueError, match="a value of type set cannot be pickled"):
        dump([{1}])
    with pytest.raises(ValueError, match="an integer of 1251 bytes"):
        dump(1 << 10_000)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (collections.OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
        (torch.Size((2, 3)), (2, 3)),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
        (torch.strided, "torch.strided"),
        (torch.bfloat16, BY_TORCH_NAME["bfloat16"]),
        (torch.float8_e4m3fn, BY_TORCH_NAME["float8_e4m3fn"]),
        (torch.torch_version.TorchVersion("2.13.0"), "2.13.0"),
        (PurePosixPath("/a/b"), "/a/b"),
        (Path("a/b"), "a/b"),
        (bytearray(b"a\xff"), b"a\xff"),
        (bytearray(), b""),
        (b"", b""),
        (frozenset({1, 2}), {1, 2}),
    ],
)
def test_values_of_known_types_become_plain_ones(
    value: object, plain: object, protocol: int
) -> None:
    assert load(pickle.dumps(value, protocol), "file") == plain


def test_attributes_of_an_ordered_dict_are_not_kept() -> None:
    state = torch.nn.ReLU().state_dict()  # has `_metadata`
    assert vars(state)
    assert load(pickle.dumps(state, 2), "file") == {}


SYSTEM = b"cposix\nsystem\n"
METADATA = f"c{DCP}\nMetadata\n)\x81".encode("latin-1")
HOSTILE = {
    "by GLOBAL and REDUCE": SYSTEM + b"(%btR",
    "by STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93%b\x85R",
    "by NEWOBJ": SYSTEM + b"%b\x85\x81",
    "by NEWOBJ_EX": SYSTEM + b"%b\x85}\x92",
    "by INST": b"(%biposix\nsystem\n",
    "by OBJ": b"(" + SYSTEM + b"%bo",
    "by BUILD": METADATA + b"}X\x0c\0\0\0__setstate__" + SYSTEM + b"sb%bb",
    "as a persistent id": SYSTEM + b"%b\x85RQ",
    "in a list in a dict": b"}X\x01\0\0\0a]" + SYSTEM + b"%b\x85Ras",
    "in an OrderedDict": b"ccollections\nOrderedDict\n" + SYSTEM + b"%b\x85R\x85R",
}
"""Ways to run a command, whose text goes in the place of %b."""


@pytest.mark.parametrize("way", HOSTILE)
def test_a_command_is_refused_by_name_and_not_run(way: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    data = pickled(HOSTILE[way] % text(f"touch {proof}"))
    with pytest.raises(HostileError, match=r"model.pt: the pickle asks for posix.system, which"):
        load(data, "model.pt")
    assert not proof.exists()
    if way == "by GLOBAL and REDUCE":  # The same bytes do run where a pickle is trusted.
        pickle.loads(data)
        assert proof.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "callee", [os.system, subprocess.Popen, eval, exec, getattr, __import__, open, runpy.run_path]
)
def test_what_no_checkpoint_needs_is_refused_in_every_protocol(callee: Any, protocol: int) -> None:
    with pytest.raises(HostileError, match=callee.__name__):
        load(pickle.dumps(Doing(callee, "1"), protocol), "model.pt")


@pytest.mark.parametrize(
    "name",
    [
        "torch.hub load",
        "torch load",
        "torch._utils _import_dotted_name",
        "torch.serialization load",
        "collections OrderedDict.__init__",
        "pathlib Path.unlink",
        "builtins type",
        "builtins dict.__class__",
        "torch os.system",
        "pathlib Path.touch",
        "commands getoutput",
        "urllib urlopen",
        "collections namedtuple.__globals__",
        "ctypes.util find_library",
    ],
)
def test_names_of_attacks_are_refused(name: str) -> None:
    module, function = name.split()
    with pytest.raises(HostileError, match=f"{module}.{function}"):
        load(pickled(f"c{module}\n{function}\n)R".encode()), "model.pt")


@pytest.mark.parametrize("name", ["code.models.Net", "commands.Train", "profile.Config", "os2.C"])
def test_a_program_s_own_module_may_have_a_name_of_python_s(name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = load(pickled(f"c{module}\n{kind}\n)\x81".encode("latin-1")), "model.pt")
    assert isinstance(found, Opaque)
    assert found.type == name


def test_a_name_cannot_write_to_the_terminal() -> None:
    with pytest.raises(HostileError) as caught:
        load(pickled(b"c\x1b]0;owned\x07\nx" + b"y" * 10_000 + b"\n"), "model.pt")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_an_extension_code_is_refused_even_when_python_has_cached_it(tmp_path: Path) -> None:
    code, proof = 0xF0, tmp_path / "proof"
    copyreg.add_extension("posix", "system", code)
    try:
        data = pickled(b"\x82\xf0", text(f"touch {proof}"), b"\x85R")
        pickle.loads(pickled(b"\x82\xf0"))
        for opcode in (data, pickled(b"\x83\xf0\0"), pickled(b"\x84\xf0\0\0\0")):
            with pytest.raises(HostileError, match="extension code"):
                load(opcode, "model.pt")
    finally:
        copyreg.remove_extension("posix", "system", code)
        copyreg.clear_extension_cache()
    assert not proof.exists()


@pytest.mark.parametrize("name", ["Metadata", "MetadataIndex", "TensorProperties"])
def test_a_state_sets_only_the_fields_of_the_record_it_is_given(name: str) -> None:
    needed = {"state_dict_metadata": {}, "planner_data": {}, "storage_data": {}}
    foreign = {"__class__": 1, "__init__": 2, "__setstate__": 3, "__dict__": {}}
    state = pickle.dumps({**foreign, **needed, "fqn": "w"}, 2)[2:-1]
    before = dict(vars(RECORDS[f"{DCP}.{name}"]))
    record = load(pickled(f"c{DCP}\n{name}\n)\x81".encode("latin-1"), state, b"b"), "file")
    assert type(record) is RECORDS[f"{DCP}.{name}"]
    assert getattr(record, "fqn", "w") == "w"
    assert dict(vars(RECORDS[f"{DCP}.{name}"])) == before


@pytest.mark.parametrize(
    "target",
    [
        f"c{DCP}\nMetadata\n".encode(),
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nfloat32\n",
        b"ctorch\nFloatStorage\n",
        b"ctorch\nSize\n)\x85R",
        b"]",
        b"K\x01",
    ],
)
@pytest.mark.parametrize("state", [b"}", b"N}X\x05\0\0\0shapeK\x01s\x86"])
def test_a_state_for_anything_but_a_record_is_an_error(target: bytes, state: bytes) -> None:
    with pytest.raises(FormatError, match="given a state"):
        load(pickled(target, state, b"b"), "file")


def test_metadata_of_dcp_read_as_records() -> None:
    from torch.distributed.checkpoint import metadata as dcp

    index = dcp.MetadataIndex("w", torch.Size((0, 2)), 1)
    # torch 2.6 has no version.
    version = ("1.0.0",) if "version" in {each.name for each in fields(dcp.Metadata)} else ()
    found = load(pickle.dumps(dcp.Metadata({}, None, {index: 1}, None, *version)), ".metadata")
    assert found == Metadata({}, None, {MetadataIndex("w", (0, 2)): 1}, None, *version)


def test_older_places_of_the_records_are_known() -> None:
    old = b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n)\x81"
    state = b"(ctorch\nfloat16\nN\x89N\x89tb"
    record = load(pickled(old, state), "file")
    assert getattr(record, "dtype", None) == BY_TORCH_NAME["float16"]


def tensor(storage: bytes, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    view = dump((at, shape, strides, False, Call("collections.OrderedDict", ())))[3:-2]
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + view + b"tR"


STORAGE = dump(Storage("0", BY_TORCH_NAME["float32"], 6))[2:-1]


def test_a_tensor_reads_as_a_view_of_its_storage() -> None:
    found = load(pickled(tensor(STORAGE, 1, (2, 2), (3, 0))), "file")
    dtype = BY_TORCH_NAME["float32"]
    assert found == StoredTensor(Storage("0", dtype, 6), dtype, 1, (2, 2), (3, 0))


@pytest.mark.parametrize(
    ("at", "shape", "strides"),
    [(0, (7,), (1,)), (6, (1,), (1,)), (1, (2, 3), (3, 1)), (0, (2,), (6,)), (7, (), ())],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_an_error(
    at: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(FormatError, match="reaches beyond its storage of 24 bytes"):
        load(pickled(tensor(STORAGE, at, shape, strides)), "file")


@pytest.mark.parametrize(
    ("at", "shape", "strides"),
    [
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (1,), (-1,)),
        (0, (1, 1), (1,)),
        (0, (1 << 62, 4), (0, 0)),
        (0, (1,) * 65, (1,) * 65),
    ],
)
def test_an_absurd_view_is_an_error(
    at: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(FormatError):
        load(pickled(tensor(STORAGE, at, shape, strides)), "file")


@pytest.mark.parametrize(
    "data",
    [
        pickled(b"\x8b\xff\xff\xff\x7f"),  # an integer of 2 GiB
        pickled(b"\x8b" + pack("<i", INTEGER_BYTES + 1) + bytes(INTEGER_BYTES + 1)),
        pickled(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"),  # bytes without end
        pickled(b"X\xff\xff\xff\xff"),
        pickled(b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R"),  # bytearray(2 GiB)
        pickled(b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R"),
    ],
)
def test_announced_sizes_allocate_nothing(data: bytes) -> None:
    with pytest.raises(FormatError):
        load(data, "file")


def test_a_place_in_the_memo_allocates_nothing() -> None:
    assert load(pickled(b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff"), "file") == 7


@pytest.mark.parametrize(
    "key",
    [
        b"]",
        b"}",
        b"\x8f",
        b")" + b"\x85" * 200_000,  # hashing it would overflow the C stack
        f"c{DCP}\nMetadataIndex\n)\x81}}X\x03\0\0\0fqn]sb".encode("latin-1"),
        f"c{DCP}\nMetadata\n)\x81".encode("latin-1"),
        b"cnumpy\ndtype\n(X\x02\0\0\0f4tR",
    ],
)
def test_what_cannot_be_hashed_safely_is_no_key(key: bytes) -> None:
    for data in (b"}" + key + b"Ns", b"\x8f(" + key + b"\x90", b"(" + key + b"\x91"):
        with pytest.raises(FormatError, match="byte"):
            load(pickled(data), "file")


def test_a_list_may_hold_itself() -> None:
    found = load(pickled(b"]q\0h\0a"), "file")
    assert isinstance(found, list)
    assert found[0] is found


def test_the_text_protocol_that_torch_never_writes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="opcode b"):
        load(pickle.dumps({"a": 1}, 0)[1:], "file")


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_truncation_is_an_error_that_names_the_file(protocol: int) -> None:
    data = pickle.dumps(
        {"w": [1, 2.5, "text", b"bytes", (1, 2), {3}], "d": collections.OrderedDict(a=1)}, protocol
    )
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"model\.pt: "):
            load(data[:length], "model.pt")
    with pytest.raises(FormatError, match="bytes follow the pickle"):
        load(data + b".", "model.pt")


HONEST = pickle.dumps(
    [{"w": torch.Size((1, 2)), "d": torch.float32}, (1, 2.0, "x"), {4}, {("a", 1): b"b"}, 1 << 70]
)


@settings(max_examples=examples(200))
@given(st.data())
def test_damaged_bytes_give_a_value_or_a_format_error(data: st.DataObject) -> None:
    damaged = bytearray(HONEST)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        load(bytes(damaged), "file")
    except FormatError:
        return


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
NAMED = [f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode() for name in RECORDS]


@settings(max_examples=examples(300))
@given(
    st.lists(st.sampled_from(OPCODES) | st.sampled_from(NAMED) | st.binary(max_size=4), max_size=40)
)
@example([b"]", b"q\0", b"h\0", b"a"])
def test_any_opcodes_give_a_value_or_a_format_error(parts: list[bytes]) -> None:
    try:
        load(pickled(*parts), "file")
    except FormatError:
        return


def test_the_formats_of_torch_are_read_without_torch() -> None:
    code = "import sys, formats.torch_save, formats.dcp; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
