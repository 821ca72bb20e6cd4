"""What a loss of power takes is what was not flushed: nothing depends on that.

The steps of a command (`steps`) are gone through with a book of what the disk was made to keep. A
file's bytes are kept from its `fsync` on, its name from the next `fsync` of its folder on; until
then both may be gone, or be there, in any order.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.faults.commands import save
from tests.faults.conftest import Jobs

PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")
MANIFEST = "manifest.json"


class Disk:
    """What is kept of one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.bytes: set[str] = set()
        """Files whose bytes are kept, by the names that they are written under."""
        self.names: set[str] = set()
        """Names that are kept."""
        self.begun: set[str] = set()
        """Names that have appeared since the folder was flushed."""
        self.gone: set[str] = set()
        """Names that were removed since then."""
        self.committed = False

    def take(self, step: str, name: str) -> None:
        """One step; fails where it depends on what is not kept."""
        if step in ("write", "writev", "pwrite"):
            self.bytes.discard(name)
        elif step == "fsync" and name == self._folder:
            self.names = (self.names | self.begun) - self.gone
            self.begun, self.gone = set(), set()
        elif step == "fsync":
            self.bytes.add(name)
        elif step in ("link", "replace"):
            self._appear(name)
        elif step == "unlink" and not PART.fullmatch(name):
            self._disappear(name)

    def _appear(self, part: str) -> None:
        matched = PART.fullmatch(part)
        assert matched, part
        assert part in self.bytes, f"{part} gets its name before its bytes are kept"
        if matched[1] == MANIFEST:
            assert not self.begun, f"the manifest comes before the names {self.begun} are kept"
            self.committed = True
        self.begun.add(matched[1])

    def _disappear(self, name: str) -> None:
        if name != MANIFEST:
            settled = MANIFEST not in self.begun
            assert settled, f"{name} goes before the manifest that does not name it is kept"
        self.gone.add(name)


@pytest.mark.thorough
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_manifest_is_written_when_all_it_names_is_kept_and_old_files_go_when_it_is(
    jobs: Jobs, tmp_path: Path, overwrite: bool, blocking: bool
) -> None:
    url = str(tmp_path / "new")
    if overwrite:
        save(url, 1)
    told: dict[str, Any] = {"url": url, "step": 2, "overwrite": overwrite, "blocking": blocking}
    ended, steps = jobs.run("save", str(tmp_path), 2, **told)
    assert not any(one.error for one in ended)
    disk = Disk("new")
    for line in steps:
        _, _, step, name = line.split(" ", 3)
        disk.take(step, name)
    assert disk.committed
    assert not disk.begun, "the save returns before the manifest is kept"
    if not overwrite:
        made = [line.split(" ", 2)[2] for line in steps if " mkdir " in line or " fsync " in line]
        assert made.index(f"fsync {tmp_path.name}") > made.index("mkdir new")


def test_a_manifest_is_gone_for_good_before_what_it_names_goes(jobs: Jobs, tmp_path: Path) -> None:
    save(str(tmp_path / "new"), 1)
    ended, steps = jobs.run("delete", str(tmp_path), url=str(tmp_path / "new"))
    assert not ended[0].error
    told = [line.split(" ", 3)[2:] for line in steps]
    first, second = told[:2]
    assert (first, second) == (["unlink", MANIFEST], ["fsync", "new"])
    assert all(name.endswith(".safetensors") for step, name in told[2:] if step == "unlink")


def test_a_converted_folder_is_kept_before_it_takes_the_place_of_another(
    jobs: Jobs, tmp_path: Path
) -> None:
    save(str(tmp_path / "source"), 1)
    ckpt.convert(tmp_path / "source", tmp_path / "hf", to="hf")
    where = {"source": str(tmp_path / "source"), "target": str(tmp_path / "hf")}
    ended, steps = jobs.run("convert", str(tmp_path), **where, to="hf", overwrite=True)
    assert not ended[0].error
    told = [line.split(" ", 3)[2:] for line in steps]
    disk = Disk(next(name for step, name in told if step == "mkdir" and PART.fullmatch(name)))
    placed = max(at for at, one in enumerate(told) if one == ["fsync", tmp_path.name])
    for step, name in told[:placed]:
        disk.take(step, name)
    assert disk.names
    assert not disk.begun
    # From here on the old one is taken down.
    assert {step for step, _ in told[placed + 1 :]} == {"unlink", "rmdir"}
