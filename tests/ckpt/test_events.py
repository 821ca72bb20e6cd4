"""Events tell the stages of calls with their times, and cost nothing where nobody listens."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from sharding.agreement import call_events

STATE = {"w": torch.ones(100, 3), "step": 3}


def stages(events: list[ckpt.events.Event], call: str) -> list[str]:
    return [event.stage for event in events if event.call == call]


def test_a_save_and_a_load_have_their_stages_and_then_the_whole(tmp_path: Path) -> None:
    with ckpt.events.recorded() as events:
        ckpt.save(tmp_path / "a", STATE)
        ckpt.load(tmp_path / "a", {"w": torch.zeros(100, 3), "step": 0})
    assert stages(events, "ckpt.save") == ["describing the state", "writing", "committing", ""]
    assert stages(events, "ckpt.load")[-2:] == ["installing the loaded state", ""]
    for call in ("ckpt.save", "ckpt.load"):
        *parts, whole = [event for event in events if event.call == call]
        assert whole.nbytes == 1200
        assert sum(part.nbytes for part in parts) == 1200
        assert sum(part.seconds for part in parts) <= whole.seconds
        assert all(whole.began <= part.began for part in parts)


def test_a_background_save_tells_of_its_copy_and_of_its_own_thread(tmp_path: Path) -> None:
    with ckpt.events.recorded() as events:
        ckpt.save(tmp_path / "a", STATE, blocking=False).wait()
    assert stages(events, "ckpt.save(blocking=False)") == [
        "describing the state",
        "copying the state",
        "",
    ]
    assert stages(events, "a save in the background") == ["writing", "committing", ""]
    *parts, whole = [event for event in events if event.call == "a save in the background"]
    assert [event.nbytes for event in (*parts, whole)] == [1200, 0, 1200]
    assert whole.began <= min(part.began for part in parts)
    assert sum(part.seconds for part in parts) <= whole.seconds


def test_a_conversion_has_its_stages_and_counts_the_bytes_that_it_reads(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", STATE)
    with ckpt.events.recorded() as events:
        ckpt.convert(tmp_path / "a", tmp_path / "b", verify=True)
        ckpt.convert(tmp_path / "a", tmp_path / "c.pt", dry_run=True)
    assert stages(events, "ckpt.convert") == [
        "reading the source",
        "writing",
        "verifying",
        "",
        "reading the source",
        "",
    ]
    assert [event.nbytes for event in events] == [0, 1200, 0, 1200, 0, 0]


def test_a_conversion_that_fails_has_an_event_with_its_error(tmp_path: Path) -> None:
    with ckpt.events.recorded() as events, pytest.raises(ckpt.NotACheckpointError):
        ckpt.convert(tmp_path / "a", tmp_path / "b")
    assert [(event.stage, event.error) for event in events] == [
        ("reading the source", "NotACheckpointError"),
        ("", "NotACheckpointError"),
    ]


def test_nothing_is_told_before_and_after_the_subscription(tmp_path: Path) -> None:
    found: list[ckpt.events.Event] = []
    ckpt.save(tmp_path / "a", STATE)
    end = ckpt.events.subscribe(found.append)
    ckpt.save(tmp_path / "b", STATE)
    end()
    end()
    ckpt.save(tmp_path / "c", STATE)
    assert len(found) == 4
    assert call_events._observers == ()


def test_a_call_that_fails_has_an_event_with_its_error(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", STATE)
    with ckpt.events.recorded() as events, pytest.raises(ckpt.ExistsError):
        ckpt.save(tmp_path / "a", STATE)
    assert [(event.stage, event.error) for event in events] == [
        ("describing the state", "ExistsError"),
        ("", "ExistsError"),
    ]


def test_an_error_of_a_callback_is_a_warning_once_and_the_save_goes_on(tmp_path: Path) -> None:
    def fails(event: ckpt.events.Event) -> None:
        raise ValueError("a dashboard is away")

    end = ckpt.events.subscribe(fails)
    with pytest.warns(UserWarning, match="ValueError: a dashboard is away") as told:
        ckpt.save(tmp_path / "a", STATE)
    end()
    assert len(told) == 1
    assert ckpt.read(tmp_path / "a")["step"] == 3


def test_a_trace_is_json_of_the_trace_event_format(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "b", STATE)
    with pytest.raises(ckpt.ExistsError):
        save_traced(tmp_path / "new" / "t-{rank}.json", tmp_path / "a", tmp_path / "b")
    rows = json.loads((tmp_path / "new" / "t-0.json").read_text())["traceEvents"]
    assert rows[0] == {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}
    complete = [row for row in rows if row["ph"] == "X"]
    assert [row["name"] for row in complete][:4] == [
        "describing the state",
        "writing",
        "committing",
        "ckpt.save",
    ]
    first, whole = complete[0], complete[3]
    assert whole["ts"] <= first["ts"] <= first["ts"] + first["dur"] <= whole["ts"] + whole["dur"]
    assert complete[-1]["args"]["error"] == "ExistsError"


def save_traced(trace: Path, *folders: Path) -> None:
    with ckpt.events.trace(trace):
        for folder in folders:
            ckpt.save(folder, STATE)


def test_records_of_the_log_have_the_fields_of_the_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = ckpt.events.log()
    with caplog.at_level(logging.INFO, ckpt.events.LOGGER):
        ckpt.save(tmp_path / "a", STATE)
    end()
    (record,) = caplog.records
    fields: dict[str, Any] = vars(record)
    assert (fields["ckpt_call"], fields["ckpt_nbytes"], fields["ckpt_rank"]) == (
        "ckpt.save",
        1200,
        0,
    )
    assert "ckpt.save took " in record.message


def save_on_ranks(folder: str) -> list[tuple[int, int, str, bool]]:
    rank = torch.distributed.get_rank()
    with ckpt.events.recorded() as events:
        ckpt.save(folder, {f"own{rank}": torch.ones(10 * (1 + rank))})
    assert all(0 <= event.waited <= event.seconds for event in events)
    whole = events[-1]
    return [(whole.rank, whole.world_size, whole.call, whole.waited > 0)]


def test_each_rank_has_its_own_events_with_its_waits(clusters: Callable, tmp_path: Path) -> None:
    told = clusters(2).run(save_on_ranks, str(tmp_path / "a"))
    assert told == [[(0, 2, "ckpt.save", True)], [(1, 2, "ckpt.save", True)]]


def convert_on_ranks(folder: str) -> list[tuple[int, int, set[str]]]:
    with ckpt.events.recorded() as events:
        ckpt.convert(f"{folder}/a", f"{folder}/b.safetensors", group=None)
    whole = events[-1]
    assert whole.call == "ckpt.convert"
    assert 0 < whole.waited <= whole.seconds
    assert sum(event.nbytes for event in events[:-1]) == whole.nbytes
    return [(whole.rank, whole.nbytes, {event.stage for event in events})]


def test_each_rank_of_a_conversion_counts_its_share(clusters: Callable, tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", {f"w{i}": torch.ones(4096) for i in range(4)})
    found = [one for (one,) in clusters(2).run(convert_on_ranks, str(tmp_path))]
    assert [(rank, nbytes) for rank, nbytes, _ in found] == [(0, 32768), (1, 32768)]
    for _, _, names in found:
        assert {"reading the source", "copying", "flushing", "completing", ""} <= names
