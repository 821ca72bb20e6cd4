"""Applies mappings to a catalog: a catalog of the same bytes under other names and shapes.

Rules:

1. A name belongs to the first rule that names it. Renames of plain names count last, the longest
   one first, as in `ckpt.load(rename=)`.
2. A rule that names nothing is an error unless it is optional, and so are two tensors with one new
   name, a missing member of a rule, and sizes that do not divide.
3. A name without a rule stays, or is an error if the mapping is strict. Plain values are renamed,
   and never an error.
4. Names that are tied stay tied if their rules do the same to them. The mapping names tied names
   that a checkpoint may lack: a missing one is added, tied to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.mapping.members import Group, Indices, Member, Texts, member_of
from ckpt.mapping.rules import Rule, TensorMapping
from ckpt.mapping.tree import renamed_tree
from ckpt.match.selection import no_name
from ckpt.state.patterns import is_plain, matches, prefix_in, renamer
from ckpt.state.saved import leaves
from formats.catalog import Catalog, TensorRecord, TensorRef, Tree
from sharding.errors import ArgumentError, listed

SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True)
class Mapped:
    """A catalog after changes, with the origin of each name."""

    catalog: Catalog
    origins: Mapping[str, tuple[str, ...]]
    """The name of each leaf -> the names in the checkpoint that it comes from."""
    excluded: tuple[str, ...] = ()
    """The names in the checkpoint that a mapping left out."""

    @classmethod
    def unchanged(cls, catalog: Catalog) -> Mapped:
        """Returns a catalog in which each name comes from itself."""
        return cls(catalog, {name: (name,) for name, _ in leaves(catalog.tree)})


def mapped(before: Mapped, mapping: TensorMapping, parameters: Mapping[str, int]) -> Mapped:
    """Returns a catalog with the new names and shapes. Reads nothing.

    `parameters` has the sizes that the rules name.

    Raises:
        ArgumentError: see the rules above; the message names the mapping, the rule and the names.
    """
    catalog = before.catalog
    found = dict(leaves(catalog.tree))
    tied = {
        name: first
        for name, first in mapping.tied.items()
        if name not in found and isinstance(found.get(first), TensorRef)
    }
    kept = {
        name: leaf
        for name, leaf in [*found.items(), *((name, found[tied[name]]) for name in tied)]
        if not any(matches(pattern, name) for pattern in mapping.exclude)
    }
    claims = _Claims.of(mapping, kept)
    claims.check_all_rules_match(mapping, list(found))
    changed = _Changed.of(catalog, kept, claims, parameters)
    outputs = {name: changed.outputs(name, leaf) for name, leaf in kept.items()}
    for name, first in tied.items():
        if name in outputs and first in outputs:
            outputs[first] |= outputs.pop(name)
    tensors, aliases, sources = _named(outputs, mapping)
    tree = renamed_tree(
        catalog.tree,
        lambda name, leaf: [
            (new, TensorRef(aliases.get(new, new)) if made.record is not None else leaf)
            for new, made in outputs.get(name, {}).items()
        ],
    )
    # A tree from which everything was left out is a leaf without an origin.
    origins = {
        new: tuple(
            dict.fromkeys(
                first for name in names for first in before.origins.get(tied.get(name, name), ())
            )
        )
        for new, names in sources.items()
    }
    dropped = [
        first for name in found if name not in kept for first in before.origins.get(name, ())
    ]
    left_out = (*before.excluded, *dropped)
    new = replace(catalog, tensors=tensors, aliases=aliases, tree=tree, optimizers={})
    return Mapped(new, origins, left_out)


@dataclass(frozen=True, slots=True)
class _Made:
    """A leaf under its new name."""

    sources: tuple[str, ...]
    record: TensorRecord | None
    """The tensor; None for a plain value."""
    same: object
    """Equal for names of one tensor that were changed alike (rule 4)."""


@dataclass(frozen=True, slots=True)
class _Claims:
    """The rule of each name."""

    members: Mapping[str, tuple[Rule, Member]]
    """The rules with a rearrangement, by the old name."""
    renames: Mapping[str, tuple[Rule, str]]
    """The other rules, each with the new name, by the old name."""

    @classmethod
    def of(cls, mapping: TensorMapping, entries: Mapping[str, Tree]) -> _Claims:
        """Finds the rule of each name (rule 1)."""
        ordered = [rule for rule in mapping.rules if not _is_prefix(rule)]
        prefixes = {rule.sources[0].rstrip("."): rule for rule in mapping.rules if _is_prefix(rule)}
        members: dict[str, tuple[Rule, Member]] = {}
        renames: dict[str, tuple[Rule, str]] = {}
        for name, leaf in entries.items():
            for rule in ordered:
                if rule.rearrange is None:
                    if matches(rule.sources[0], name):
                        renames[name] = rule, _renamed(rule, name)
                        break
                elif isinstance(leaf, TensorRef):
                    member = member_of(rule, name)
                    if member is not None:
                        members[name] = rule, member
                        break
            else:
                prefix = prefix_in(prefixes, name)
                if prefix is not None:
                    renames[name] = prefixes[prefix], _renamed(prefixes[prefix], name)
        if mapping.strict:
            _check_none_left(
                mapping,
                [
                    name
                    for name, leaf in entries.items()
                    if isinstance(leaf, TensorRef) and name not in members and name not in renames
                ],
            )
        return cls(members, renames)

    def check_all_rules_match(self, mapping: TensorMapping, names: Sequence[str]) -> None:
        """Raises ArgumentError for a rule that names nothing (rule 2)."""
        used = {id(rule) for rule, _ in (*self.members.values(), *self.renames.values())}
        for rule in mapping.rules:
            if id(rule) not in used and not rule.optional and rule.sources != ("",):
                raise ArgumentError(f"{rule.where}: {no_name(rule.sources[0], names)}")


def _is_prefix(rule: Rule) -> bool:
    return rule.rearrange is None and is_plain(rule.sources[0])


def _renamed(rule: Rule, name: str) -> str:
    return renamer({rule.sources[0]: rule.targets[0]})(name)


def _check_none_left(mapping: TensorMapping, names: Sequence[str]) -> None:
    if names:
        raise ArgumentError(
            f"{mapping.name} has no rule for {listed(names, SHOWN_NAMES)}: the checkpoint is of "
            "another model, or holds more: select= takes the model alone, and exclude= leaves "
            "tensors out",
            names=names,
        )


_Named = list[tuple[str, Member]]


@dataclass(frozen=True, slots=True)
class _Changed:
    """The new leaves of a catalog, made group by group."""

    catalog: Catalog
    leaves: Mapping[str, Tree]
    claims: _Claims
    parameters: Mapping[str, int]
    groups: Mapping[tuple[int, Texts], _Named]
    """The members of each rule with the same texts."""

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        entries: Mapping[str, Tree],
        claims: _Claims,
        parameters: Mapping[str, int],
    ) -> _Changed:
        """Collects the groups."""
        groups: dict[tuple[int, Texts], _Named] = {}
        for name, (rule, member) in claims.members.items():
            groups.setdefault((id(rule), member.texts), []).append((name, member))
        return cls(catalog, entries, claims, parameters, groups)

    def outputs(self, name: str, leaf: Tree) -> dict[str, _Made]:
        """Returns the new leaves that stand in the place of a leaf.

        The first name of a group gives all tensors of the group, the others none.
        """
        if name in self.claims.members:
            rule, member = self.claims.members[name]
            group = self.groups[id(rule), member.texts]
            return self._of_group(rule, member.texts, group) if group[0][0] == name else {}
        new = self.claims.renames[name][1] if name in self.claims.renames else name
        if not isinstance(leaf, TensorRef):
            return {new: _Made((name,), None, None)}
        record = self.catalog.tensors[leaf.name]
        return {new: _Made((name,), replace(record, name=new), leaf.name)}

    def _of_group(self, rule: Rule, texts: Texts, group: _Named) -> dict[str, _Made]:
        records: dict[tuple[int, Indices], TensorRecord] = {}
        stored: list[str] = []
        for name, member in group:
            ref = self.leaves[name]
            assert isinstance(ref, TensorRef)
            records[member.part, member.indices] = replace(
                self.catalog.tensors[ref.name], name=name
            )
            stored.append(ref.name)
        targets = Group(rule, texts, records, self.parameters).targets()
        names = tuple(name for name, _ in sorted(group, key=_place))
        alike = str(rule.rearrange), tuple(rule.sizes.items()), rule.parts, tuple(stored)
        return {
            new: _Made(names, record, (*alike, number))
            for number, (new, record) in enumerate(targets.items())
        }


def _place(named: tuple[str, Member]) -> tuple[int, Indices]:
    return named[1].part, named[1].indices


def _named(
    outputs: Mapping[str, Mapping[str, _Made]], mapping: TensorMapping
) -> tuple[dict[str, TensorRecord], dict[str, str], dict[str, tuple[str, ...]]]:
    """Returns the tensors and tied names by their new names, and the origins of all names."""
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    sources: dict[str, tuple[str, ...]] = {}
    first_of: dict[object, str] = {}
    for made_of in outputs.values():
        for new, made in made_of.items():
            if not new and made.sources != ("",):
                names = ", ".join(made.sources)
                raise ArgumentError(f"{mapping.name}: {names} would have an empty name")
            if new in sources:
                raise ArgumentError(
                    f"{mapping.name}: {', '.join(sources[new])} and {', '.join(made.sources)} both "
                    f"get the name {new}"
                )
            sources[new] = made.sources
            if made.record is None:
                continue
            first = first_of.setdefault(made.same, new)
            if first == new:
                tensors[new] = made.record
            else:
                aliases[new] = first
    return tensors, aliases, sources
