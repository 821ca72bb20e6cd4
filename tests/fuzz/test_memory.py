"""What a value of JSON, a step of a pickle and a record of a zip take, at the worst: measured.

docs/hostile-input.md promises these numbers.
"""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Callable

import pytest

from formats.errors import FormatError
from formats.limits import decode_object
from formats.pickles.machine import load
from formats.zip_records import Archive
from tests.fuzz.folders import Folder

COUNT = 20_000
VALUE_BYTES = 120
STEP_BYTES = 100
RECORD_BYTES = 700
FREE_BYTES = 24 << 20
"""What sets may take beyond that: a third of the elements that a pickle may copy for nothing."""


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that an action takes beyond what was there."""
    tracemalloc.start()
    try:
        action()
    except FormatError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "item", ["[]", "{}", '{"":0}', "1.5", "1000", '"ab"', '{"a":[]}', '"%d":0']
)
def test_a_value_of_json_takes_no_more_than_is_promised(item: str) -> None:
    if "%d" in item:
        document = "{" + ",".join(item % number for number in range(COUNT)) + "}"
    else:
        document = '{"a":[' + ",".join([item] * COUNT) + "]}"
    values = sum(map(document.count, ",:[{"))
    peak = peak_bytes(lambda: decode_object(document.encode(), "x"))
    assert peak < VALUE_BYTES * values + 2 * len(document)


STEPS = {
    "lists": (b"]", 1),
    "dicts": (b"}", 1),
    "sets": (b"\x8f", 1),
    "tuples": (b"N\x85", 2),
    "marks": (b"(", 1),
    "what is remembered": (b"]\x94", 2),
    "floats": (b"G" + bytes(8), 1),
    "integers": (b"\x8a\x08" + b"\x7f" * 8, 1),
    "bytes": (b"C\x02ab", 1),
    "texts": (b"\x8c\x02ab", 1),
    "records": (b"h\x00)\x81", 3),
    "dicts that are called": (b"h\x01)R", 3),
    "sets that are called": (b"h\x02)R", 3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", STEPS)
def test_a_step_of_a_pickle_takes_no_more_than_is_promised(what: str) -> None:
    item, steps = STEPS[what]
    names = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nq\x000"
        b"ccollections\nOrderedDict\nq\x010cbuiltins\nset\nq\x020"
    )
    data = b"\x80\x04" + names + b"](" + item * COUNT + b"e."
    assert peak_bytes(lambda: load(data, "x")) < STEP_BYTES * steps * COUNT + FREE_BYTES * (
        "sets" in what
    )


@pytest.mark.thorough
def test_a_record_of_a_zip_takes_no_more_than_is_promised() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        for number in range(COUNT // 4):
            archive.writestr(f"a/{number}", b"")
    folder = Folder({"a.pt": target.getvalue()})
    assert peak_bytes(lambda: Archive(folder, "a.pt")) < RECORD_BYTES * COUNT // 4
