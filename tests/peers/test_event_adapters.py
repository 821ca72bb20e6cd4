"""Events reach the real TensorBoard and the real OpenTelemetry."""

from pathlib import Path

import pytest
import torch

import ckpt

STATE = {"w": torch.ones(1000)}


def test_calls_are_curves_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard here: make test-peers installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from ckpt.integrations.tensorboard import scalars

    with SummaryWriter(str(tmp_path / "board")) as writer:
        end = scalars(writer)
        for name in "abc":
            ckpt.save(tmp_path / name, STATE)
        end()
        ckpt.save(tmp_path / "d", STATE)
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(found.Tags()["scalars"]) == {
        f"ckpt/ckpt.save/{name}" for name in ("seconds", "waited", "bytes_per_second")
    }
    points = found.Scalars("ckpt/ckpt.save/seconds")
    assert [point.step for point in points] == [1, 2, 3]
    assert all(point.value > 0 for point in points)


def test_requests_to_a_bucket_are_curves(tmp_path: Path) -> None:
    from ckpt.integrations.tensorboard import scalars

    points: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            points[tag] = value

    end = scalars(Writer())
    ckpt.save(f"memory://{tmp_path.name}/a", STATE)
    end()
    assert points["ckpt/ckpt.save/requests/put.sent"] >= 2
    assert points["ckpt/ckpt.save/requests/put.nbytes"] >= 4000


def test_stages_are_spans_of_opentelemetry(tmp_path: Path) -> None:
    reason = "no opentelemetry-sdk here: make test-peers installs it"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=reason)
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ckpt.integrations.opentelemetry import spans

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    end = spans(provider.get_tracer("test"))
    ckpt.save(tmp_path / "a", STATE)
    with pytest.raises(ckpt.ExistsError):
        ckpt.save(tmp_path / "a", STATE)
    ckpt.save(f"memory://{tmp_path.name}/a", STATE)
    end()
    found = exporter.get_finished_spans()
    assert found[-1].attributes["ckpt.put.sent"] >= 2
    assert [one.name for one in found][:4] == [
        "ckpt.save: describing the state",
        "ckpt.save: writing",
        "ckpt.save: committing",
        "ckpt.save",
    ]
    assert found[3].attributes["ckpt.nbytes"] == 4000
    assert found[3].end_time > found[3].start_time
    assert "ExistsError" in [one.status.description for one in found]
    assert not any("requests" in name for one in found for name in one.attributes)
