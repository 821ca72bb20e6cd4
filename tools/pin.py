"""`ckpt pin`: a checkpoint of a run under a name, so that nothing removes it."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, field

from ckpt.errors import NotACheckpointError
from ckpt.transfer.facts import pins_in, step_of
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import Option, add_storage_options, mapping
from tools.text import place

HELP = Help(
    summary="pin a checkpoint of a run under a name, so that nothing removes it",
    description="""\
Pins a checkpoint of a run under a name: no rule of the run and no `ckpt rm` removes it until the
pin is removed. Without a name it prints the pins. A run in progress sees the pin at its next
removal.""",
    examples=(
        ("ckpt pin runs/gpt/step-1000 release-1", "keeps step 1000"),
        (
            "ckpt pin --remove runs/gpt/step-1000 release-1",
            "lets the rules decide again",
        ),
    ),
    codes=OF_A_READER,
)


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoint, and the name of the pin."""

    url: str
    name: str | None
    remove: bool
    storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="RUN/step-N", help="the checkpoint, as a path or URL")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default=None,
        help="up to 64 letters, digits and ._-, a letter or digit first; without it, the pins "
        "are printed",
    )
    parser.add_argument("--remove", action="store_true", help="remove the pin")
    add_storage_options(parser)


def run(options: Options) -> int:
    """Pins the checkpoint, removes its pin, or prints the names of its pins."""
    from ckpt.run.steps import set_pin
    from ckpt.stores.store import absolute, open_store, split_url

    above, name = split_url(absolute(options.url))
    step, storage = step_of(name), mapping(options.storage_options)
    if step is None:
        raise NotACheckpointError(
            f"{options.url}: only a checkpoint of a run is pinned; give its folder, RUN/step-N"
        )
    if options.name is not None:
        set_pin(above, step, options.name, not options.remove, storage)
        return ExitCode.FINE
    with open_store(above, storage) as store:
        pins = pins_in(store.names()).get(step, ())
    if options.remove:
        text = ", ".join(pins) if pins else "none"
        raise ValueError(f"{place(options.url)}: give the name of the pin; it has {text}")
    for pin in pins:
        print(pin)
    return ExitCode.FINE
