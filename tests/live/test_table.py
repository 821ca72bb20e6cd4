"""The table of versions and leases against a model, with a clock of the test and no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckpt.live.protocol import FileAt, RefusedError
from ckpt.live.table import Table
from tests.selection import examples

LEASE = 10.0
NAME = "policy"
PLACE = {"f": FileAt(1, (("host", 1),))}
VERSIONS = st.integers(0, 6)
SECONDS = st.sampled_from([0.0, 1.0, 4.0, 9.0, 11.0, 30.0])


@dataclass
class Model:
    """One version as the test sees it."""

    is_complete: bool = False
    deadline: float | None = None
    leases: dict[str, float] = field(default_factory=dict)
    is_overdue: bool = False
    nbytes: dict[str, int] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    """Events in any order, each with the result that the rules of the table demand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(NAME, LEASE)
        self.table.own(0.0)
        self.now = 0.0
        self.count = 0
        self.versions: dict[int, Model] = {}
        self.last = -1
        """The newest version that was committed, or retired and dropped."""
        self.dropped = -1
        """The newest of those that are dropped."""

    def visible(self) -> list[int]:
        found = self.versions.items()
        return sorted(v for v, one in found if one.is_complete and one.deadline is None)

    @rule(version=VERSIONS, file=st.sampled_from("fg"), nbytes=st.integers(0, 50))
    def put(self, version: int, file: str, nbytes: int) -> None:
        found = self.versions.get(version)
        if version <= self.last or (found is not None and file in found.nbytes):
            with pytest.raises(RefusedError, match=r"not newer|here already"):
                self.table.put(version, file, nbytes)
            return
        self.table.put(version, file, nbytes)
        self.versions.setdefault(version, Model()).nbytes[file] = nbytes

    @rule(version=VERSIONS)
    def commit(self, version: int) -> None:
        if version <= self.last and version not in self.visible():
            with pytest.raises(RefusedError, match="not newer"):
                self.table.commit(version, PLACE, {})
            return
        if version in self.versions and self.versions[version].deadline is not None:
            with pytest.raises(RefusedError, match="was given up"):
                self.table.commit(version, PLACE, {})
            return
        self.table.commit(version, PLACE, {"time": self.now})
        assert self.table.versions()[version].info == {"time": self.now}
        self.versions.setdefault(version, Model()).is_complete = True
        self.last = max(self.last, version)

    @rule(version=st.none() | VERSIONS)
    def lease(self, version: int | None) -> None:
        key = f"lease {self.count}"
        self.count += 1
        wanted = max(self.visible(), default=None) if version is None else version
        if wanted not in self.visible():
            with pytest.raises(RefusedError, match=r"no version|not here|was replaced"):
                self.table.lease(version, key, self.now)
            return
        assert self.table.lease(version, key, self.now) == wanted
        self.versions[wanted].leases[key] = self.now + LEASE

    def holders(self) -> list[tuple[str, Model]]:
        return [(key, one) for one in self.versions.values() for key in one.leases]

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        key, one = data.draw(st.sampled_from(self.holders()))
        self.table.renew(key, self.now)
        one.leases[key] = self.now + LEASE

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key, one = data.draw(st.sampled_from(self.holders()))
        self.table.release(key)
        del one.leases[key]
        with pytest.raises(RefusedError, match="no such lease"):
            self.table.renew(key, self.now)

    @rule(version=VERSIONS, seconds=SECONDS)
    def retire(self, version: int, seconds: float) -> None:
        one = self.versions.get(version)
        if one is None:
            with pytest.raises(RefusedError):
                self.table.retire(version, seconds, self.now)
            return
        self.table.retire(version, seconds, self.now)
        before = one.deadline
        one.deadline = self.now + seconds if before is None else min(before, self.now + seconds)

    @rule(version=VERSIONS)
    def drop(self, version: int) -> None:
        if version not in self.versions:
            with pytest.raises(RefusedError):
                self.table.drop(version)
            return
        self.table.drop(version)
        one = self.versions.pop(version)
        is_known = one.is_complete or one.deadline is not None
        if is_known:
            self.last = max(self.last, version)
            self.dropped = max(self.dropped, version)
        with pytest.raises(RefusedError) as caught:
            self.table.find(version, "f")
        assert (caught.value.kind == "gone") == (is_known or version <= self.dropped)
        assert caught.value.values["newest"] == max(self.visible(), default=None)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        assert self.table.tick(self.now) == []
        for one in self.versions.values():
            is_late = one.deadline is not None and one.deadline <= self.now
            ended = [key for key, ends in one.leases.items() if ends <= self.now or is_late]
            for key in ended:
                del one.leases[key]
                one.is_overdue = True

    @invariant()
    def nothing_is_retired_under_a_live_lease(self) -> None:
        for version, one in self.versions.items():
            if one.deadline is not None:
                expected = None if one.leases else one.is_overdue
                assert self.table.is_retired(version) is expected

    @invariant()
    def the_newest_visible_version_is_told(self) -> None:
        visible = self.visible()
        assert self.table.visible() == visible

    @invariant()
    def files_are_served_until_their_version_is_retired(self) -> None:
        for version, one in self.versions.items():
            is_served = one.deadline is None or bool(one.leases)
            for file, nbytes in one.nbytes.items():
                if is_served:
                    assert self.table.find(version, file) == nbytes
                else:
                    with pytest.raises(RefusedError, match="was replaced"):
                        self.table.find(version, file)

    @invariant()
    def the_next_change_is_that_of_the_first_deadline(self) -> None:
        times = [ends for one in self.versions.values() for ends in one.leases.values()]
        times += [
            one.deadline
            for one in self.versions.values()
            if one.deadline is not None and one.leases
        ]
        assert self.table.next_at() == min(times, default=None)

    def teardown(self) -> None:
        """The name ends: after one lease at most, all memory is given back."""
        self.table.disown(self.now)
        gone = self.table.tick(self.now)
        with pytest.raises(RefusedError, match="no live state"):
            self.table.visible()
        gone += self.table.tick(self.now + LEASE)
        assert set(gone) == set(self.versions)
        assert not self.table.is_served
        assert self.table.leases == {}
        assert self.table.next_at() is None


TestTable = Machine.TestCase
TestTable.settings = settings(max_examples=examples(60), stateful_step_count=30)


def owned(keep_seconds: float = 0.0) -> Table:
    table = Table(NAME, LEASE)
    table.own(keep_seconds)
    table.put(1, "f", 8)
    table.commit(1, PLACE, {"step": 3})
    return table


def test_a_name_ends_with_the_last_of_its_owners() -> None:
    table = owned()
    table.own(0.0)
    table.disown(0.0)
    assert table.tick(100.0) == []
    table.disown(100.0)
    assert table.tick(100.0) == [1]


def test_a_name_is_kept_for_the_time_that_its_owner_asked_for_and_a_new_owner_has_it() -> None:
    table = owned(keep_seconds=60.0)
    table.disown(0.0)
    assert table.tick(59.0) == []
    assert table.visible() == [1]
    table.own(60.0)
    assert table.tick(500.0) == []
    table.disown(500.0)
    assert table.next_at() == 560.0
    assert table.tick(560.0) == [1]


def test_leases_outlive_the_end_of_a_name_by_one_lease_at_most() -> None:
    table = owned()
    table.lease(None, "reader", 0.0)
    table.disown(5.0)
    assert table.tick(5.0) == []
    assert table.is_ending
    with pytest.raises(RefusedError, match="no live state"):
        table.lease(None, "late", 6.0)
    with pytest.raises(RefusedError, match="is ending"):
        table.own(0.0)
    table.renew("reader", 14.0)
    assert table.find(1, "f") == 8
    assert table.tick(14.9) == []
    assert table.tick(15.0) == [1]


def test_a_removal_ends_a_name_when_its_last_lease_is_released() -> None:
    table = owned(keep_seconds=1000.0)
    table.lease(None, "reader", 0.0)
    table.remove(8.0, 0.0)
    assert table.tick(1.0) == []
    table.release("reader")
    assert table.tick(1.0) == [1]


def test_a_lease_that_ends_at_its_time_leaves_its_version_overdue() -> None:
    table = owned()
    table.lease(1, "reader", 0.0)
    table.retire(1, 2 * LEASE, 0.0)
    table.tick(LEASE - 0.1)
    assert table.is_retired(1) is None
    table.tick(LEASE)
    assert table.is_retired(1) is True


def test_a_lease_that_is_released_leaves_its_version_free() -> None:
    table = owned()
    table.lease(1, "reader", 0.0)
    table.retire(1, 2 * LEASE, 0.0)
    table.release("reader")
    assert table.is_retired(1) is False


def test_a_second_retirement_does_not_make_the_wait_longer() -> None:
    table = owned()
    table.lease(1, "reader", 0.0)
    table.retire(1, 3.0, 0.0)
    table.retire(1, 8.0, 0.0)
    assert table.next_at() == 3.0
    table.tick(3.0)
    assert table.is_retired(1) is True


def test_a_version_that_is_dropped_takes_its_leases_along() -> None:
    table = owned()
    table.lease(1, "reader", 0.0)
    table.drop(1)
    assert table.leases == {}
    assert table.tick(LEASE) == []


def test_a_number_below_the_newest_is_not_free_after_an_older_one_is_committed_again() -> None:
    table = owned()
    table.put(3, "f", 8)
    table.commit(3, PLACE, {})
    table.commit(1, PLACE, {})
    with pytest.raises(RefusedError, match="not newer than version 3"):
        table.put(2, "f", 8)


def test_a_version_that_was_retired_before_its_commit_is_not_listed_and_its_number_is_used() -> (
    None
):
    table = owned()
    table.put(2, "f", 8)
    table.retire(2, 0.0, 0.0)
    assert list(table.versions()) == [1]
    table.drop(2)
    with pytest.raises(RefusedError, match="not newer than version 2"):
        table.put(2, "f", 8)


def test_versions_tell_files_and_values() -> None:
    table = owned()
    table.put(2, "g", 5)
    found = table.versions()
    assert (found[1].files, found[1].complete, found[1].info) == (PLACE, True, {"step": 3})
    assert (found[2].files, found[2].complete) == ({"g": FileAt(5, ())}, False)


def test_a_version_needs_a_file_and_leases_have_a_bound() -> None:
    table = owned()
    with pytest.raises(RefusedError, match="at least one file"):
        table.commit(2, {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.live.table.MOST_LEASES", 1)
        table.lease(None, "one", 0.0)
        with pytest.raises(RefusedError, match="has 1 leases, and no more"):
            table.lease(None, "two", 0.0)
