"""`--include PATTERN` and `--exclude PATTERN`: the names that a command uses."""

from __future__ import annotations

from argparse import ArgumentParser


def add_name_patterns(parser: ArgumentParser) -> None:
    """Declares both; their values are `include` and `exclude` of the library."""
    for flag, said in (("--include", "only these names"), ("--exclude", "not these names")):
        parser.add_argument(
            flag,
            action="append",
            metavar="PATTERN",
            help=f"{said}; has * and ?, or is /a regular expression/; has to match a name; "
            "repeatable",
        )
