"""Events of ckpt as spans of OpenTelemetry.

from ckpt.integrations.opentelemetry import spans

end = spans()  # the tracer provider that the program has set
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ckpt.events import Event, subscribe
from ckpt.integrations import needs

__all__ = ["spans"]

with needs("opentelemetry", "opentelemetry-api"):
    from opentelemetry import trace


def spans(tracer: Any = None) -> Callable[[], None]:
    """Makes a span of each stage and each call, with the fields of the event as attributes.

    `tracer` is by default the program's own, for `ckpt`. A span that an error ended has the status
    error. Returns a function to stop it.
    """
    tracer = trace.get_tracer("ckpt") if tracer is None else tracer

    def add(event: Event) -> None:
        name = f"{event.call}: {event.stage}" if event.stage else event.call
        values = {**asdict(event), **event.numbers()}
        del values["requests"]  # attributes are plain values
        attributes = {f"ckpt.{key}": value for key, value in values.items()}
        begin = int(event.began * 1e9)
        span = tracer.start_span(name, start_time=begin, attributes=attributes)
        if event.error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, event.error))
        span.end(begin + int(event.seconds * 1e9))

    return subscribe(add)
