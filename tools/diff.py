"""`ckpt diff`: where two checkpoints are not the same, whatever their formats."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ckpt.display import count, printable, size
from sharding.errors import format_names
from tools.exit_codes import OF_A_READER, ExitCode, Help
from tools.options import (
    MappingOption,
    Option,
    Pair,
    add_name_changes,
    add_name_patterns,
    add_quiet,
    add_storage_options,
    add_storage_options_of,
    by_first,
    mapping,
    mappings_of,
)
from tools.text import colour, columns, json_text, place, progress, shorten, tensor_bytes

if TYPE_CHECKING:
    from ckpt.checking.diff import (
        Comparison,
        StructureDifference,
        TensorDifference,
        ValueDifference,
    )

HELP = Help(
    summary="compare two checkpoints of any format: names, elements, values, structure",
    description="""\
Compares two checkpoints of any format: names, shapes, dtypes, elements, plain values and
structure. Weights come before states of optimizers, and the largest differences first; then sums by
module. Single numbers and random states stand apart.""",
    examples=(
        ("ckpt diff runs/gpt/step-100 runs/gpt/step-200", "the differences of two steps"),
        (
            "ckpt diff runs/gpt/step-100 model.safetensors --select model --tensors-only",
            "whether an exported model has the weights of a checkpoint",
        ),
    ),
    codes=(ExitCode.DIFFERENT, *OF_A_READER, ExitCode.EXISTS),
)
SHOWN_DIFFERENCES = 20
"""Of each kind, without -v."""
SHOWN_MODULES = 16
SHOWN_NAMES = 3
CONTEXT = 20
"""Characters that are shown before the place where two long texts differ."""


@dataclass(frozen=True, slots=True)
class Options:
    """The two checkpoints to compare, and how closely."""

    a: str
    b: str
    rtol: float
    atol: float
    include: list[str] | None
    exclude: list[str] | None
    select: str | None
    mappings: list[MappingOption] | None
    parameters: list[tuple[str, int]] | None
    config: str | None
    rename: list[Pair] | None
    tensors_only: bool
    ignore_dtype: bool
    read_all: bool
    verbose: bool
    quiet: bool
    as_json: bool
    html: str | None
    storage_options: list[Option] | None = field(default=None, repr=False)
    b_storage_options: list[Option] | None = field(default=None, repr=False)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="a path or URL")
    add("b", metavar="B", help="another one, of any format")
    add("--rtol", type=float, default=0.0, help="close is |a-b| <= atol + rtol*|b|; default 0")
    add("--atol", type=float, default=0.0, help="default 0; both 0 compares bit by bit")
    add_name_patterns(parser)
    add(
        "--select",
        metavar="KEYPATH",
        help="compare what is below this key path, in A, B or both (example: model)",
    )
    add_name_changes(parser, "A")
    add("--tensors-only", action="store_true", help="compare neither plain values nor structure")
    add("--ignore-dtype", action="store_true", help="compare tensors of other dtypes as numbers")
    add(
        "--read-all",
        action="store_true",
        help="read all bytes, also those of chunks that have equal checksums in both",
    )
    add("-v", "--verbose", action="store_true", help="all differences, and the equal tensors")
    add_quiet(parser)
    add("--json", dest="as_json", action="store_true", help="the differences as JSON")
    add("--html", metavar="FILE", help="also write a page of A and the differences for a browser")
    add_storage_options(parser)
    add_storage_options_of(parser, "B")


def run(options: Options) -> int:
    """Prints the differences; DIFFERENT where there is one."""
    from ckpt.checking.diff import diff

    storage = mapping(options.storage_options)
    if options.html is not None:
        from tools.page import check_may_write

        check_may_write(options.html)
    with progress("diff", lambda: tensor_bytes(options.a, storage), options.quiet) as advance:
        comparison = diff(
            options.a,
            options.b,
            rtol=options.rtol,
            atol=options.atol,
            include=options.include,
            exclude=options.exclude,
            select=options.select,
            mapping=mappings_of(options.mappings),
            rename=by_first(options.rename, "--rename"),
            parameters=by_first(options.parameters, "--set"),
            config=options.config,
            values=not options.tensors_only,
            dtype=not options.ignore_dtype,
            read_all=options.read_all,
            progress=advance,
            storage_options=storage,
            b_storage_options=mapping(options.b_storage_options),
        )
    if options.html is not None:
        _write_page(options.html, options.a, storage, comparison)
    if options.as_json:
        described = {**asdict(comparison), "equal": comparison.equal}
        if not options.verbose:
            del described["equal_tensors"]
        print(json_text(described))
    elif not options.quiet:
        for line in _lines(comparison, options.verbose):
            print(line)
    return ExitCode.FINE if comparison.equal else ExitCode.DIFFERENT


def _write_page(
    path: str, url: str, storage: Mapping[str, object] | None, found: Comparison
) -> None:
    from ckpt.checking.diff import size_order
    from ckpt.opening.sources import open_source
    from tools.page import describe_differences, describe_source, name_of, write_page

    with open_source(url, storage) as source:
        data = describe_source(source, storage)
    ordered = replace(found, tensors=tuple(sorted(found.tensors, key=size_order)))
    title = f"{name_of(found.a)} → {name_of(found.b)}"
    write_page(path, {**data, "name": title, "differences": describe_differences(ordered)})


def _value_line(value: ValueDifference) -> str:
    """Returns the line of a plain value. Long texts begin shortly before they differ.

    >>> from ckpt.checking.diff import ValueDifference
    >>> _value_line(ValueDifference("lr", "3", "4")), _value_line(ValueDifference("lr", None, "4"))
    ('! lr: 3 in A, 4 in B', '+ lr: only in B: 4')
    """
    name, a, b = printable(value.name), value.a, value.b
    if a is None:
        return colour(f"+ {name}: only in B: {shorten(b or '')}", "added")
    if b is None:
        return colour(f"- {name}: only in A: {shorten(a)}", "removed")
    if shorten(a) == shorten(b):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        a, b = (f"...{text[same - CONTEXT :]}" for text in (a, b))
    return colour(f"! {name}: {shorten(a)} in A, {shorten(b)} in B", "changed")


def _prefix_notes(found: Comparison) -> Iterator[str]:
    """Yields a note on the options that help if the other side has all names below a prefix."""
    a, b = found.only_a, found.only_b
    if not a or not b or found.compared_tensors or found.tensors:
        return
    for more, less, sides, rename in ((a, b, "B are in A", "{}="), (b, a, "A are in B", "={}")):
        prefix = _prefix(more, less)
        if prefix is None:
            continue
        others = {_head(name) for name in more if not name.startswith(f"{prefix}.")}
        options = f"--rename {rename.format(prefix)}"
        if others and not any(name.startswith(f"{prefix}.") for name in less):
            options = f"--select {prefix}"
        elif others:  # --select would change both sides
            options = " ".join([options, *(f"--exclude '{other}*'" for other in sorted(others))])
        if not others & {_head(name) for name in less}:
            yield f"all names of {sides} below {prefix}; {options} compares them"


def _head(name: str) -> str:
    return name.partition(".")[0]


def _prefix(more: Sequence[str], less: Sequence[str]) -> str | None:
    """Returns the prefix below which `more` has all names of `less`; None without one.

    >>> _prefix(["model.a.w", "model.b.w", "optim.lr"], ["a.w", "b.w"]), _prefix(["a"], ["b"])
    ('model', None)
    """
    names, first = set(more), less[0]
    ends = (name.removesuffix(f".{first}") for name in more if name.endswith(f".{first}"))
    return next((end for end in ends if all(f"{end}.{name}" in names for name in less)), None)


def _lines(found: Comparison, is_verbose: bool) -> Iterator[str]:
    """Yields the report for people: the largest differences first, random states apart."""
    from ckpt.checking.diff import is_random, size_order

    if is_verbose:
        yield from (f"= {printable(name)}" for name in found.equal_tensors)
    if not found.equal:
        yield f"A is {place(found.a)}"
        yield f"B is {place(found.b)}"
    most = None if is_verbose else SHOWN_DIFFERENCES
    random = [tensor for tensor in found.tensors if is_random(tensor.name)]
    others = [difference for difference in found.tensors if not is_random(difference.name)]
    parts = (
        [colour(f"- {printable(name)}: only in A", "removed") for name in found.only_a],
        [colour(f"+ {printable(name)}: only in B", "added") for name in found.only_b],
        [
            colour(f"! {printable(other.name)}: {printable(other.detail)}", "changed")
            for other in sorted(others, key=size_order)
        ],
        [_value_line(value) for value in found.values],
        [_structure_line(difference) for difference in found.structure],
    )
    for lines in parts:
        yield from lines[:most]
        if most is not None and len(lines) > most:
            yield f"... and {len(lines) - most:,} more; -v prints all"
    if len(others) >= SHOWN_MODULES // 2:
        yield from _module_lines(others, found.equal_tensors)
    if random:
        which = format_names([difference.name for difference in random], SHOWN_NAMES)
        yield f"random states, which differ at each step: {printable(which)}"
    for note in (*found.notes, *_prefix_notes(found)):
        yield f"note: {printable(note)}"
    yield from _sum_lines(found, _largest(others) if others else None)


def _largest(differing: Sequence[TensorDifference]) -> TensorDifference:
    """Returns the largest difference; that of a single number, such as a step, only if need be."""
    return max(differing, key=lambda difference: (difference.elements > 1, difference.max_abs))


def _structure_line(difference: StructureDifference) -> str:
    name = printable(difference.name) or "the whole"
    return colour(
        f"! {name}: {printable(difference.a)} in A, {printable(difference.b)} in B", "changed"
    )


def _module_lines(differing: Sequence[TensorDifference], equal: Sequence[str]) -> Iterator[str]:
    """Yields the sums by module, with at most `SHOWN_MODULES` modules."""
    names = [difference.name.split(".") for difference in differing]
    depth = next(
        (n for n in (3, 2) if len({tuple(name[:n]) for name in names}) <= SHOWN_MODULES), 1
    )

    def module(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    same = Counter(map(module, equal))
    modules: dict[str, list[TensorDifference]] = {}
    for difference in differing:
        modules.setdefault(module(difference.name), []).append(difference)
    rows = [
        (
            f"  {printable(name)}",
            f"{len(ones):,} of {len(ones) + same[name]:,}",
            f"{sum(difference.differing for difference in ones):,}",
            f"{_largest(ones).max_abs:.6g}",
        )
        for name, ones in modules.items()
    ]
    yield "differences by module:"
    head = ("  MODULE", "TENSORS", "ELEMENTS", "LARGEST")
    yield from columns([head, *rows], right=[1, 2, 3])


def _sum_lines(found: Comparison, worst: TensorDifference | None) -> Iterator[str]:
    compared = f"{count(found.compared_tensors, 'tensor')}, {size(found.compared_bytes)} compared"
    if found.unread_bytes:
        unread = size(found.unread_bytes)
        compared += f", {unread} of them by recorded checksums (--read-all reads them)"
    if found.close_tensors:
        compared += f"; {found.close_tensors} within the tolerance and not equal"
    if worst is not None and worst.max_abs:
        compared += f"; the largest difference is {worst.max_abs:.6g}, in {printable(worst.name)}"
    elif found.close_tensors:
        compared += f"; the largest difference is {found.max_abs:.6g}"
    if found.equal:
        yield f"{colour('no difference', 'sound')}: {compared}"
        return
    names = len(found.only_a) + len(found.only_b)
    every = names + len(found.tensors) + len(found.values) + len(found.structure)
    nests = f", {len(found.structure)} in structure" if found.structure else ""
    yield (
        f"{colour(count(every, 'difference'), 'damaged')}: {names} in names, "
        f"{len(found.tensors)} in tensors, {len(found.values)} in values{nests}; {compared}"
    )
