"""Applies mappings to a catalog: a catalog of the same bytes under other names and shapes.

Rules of names:

1. A name belongs to the first rule that names it, and beside which the checkpoint has a name that
   the rule requires. Renames of plain names count last, the longest one first, as in
   `ckpt.load(rename=)`.
2. A rule that names nothing is an error unless it is optional, and so are two tensors with one new
   name, a missing member of a rule, and sizes that do not divide.
3. A name without a rule stays, or is an error if the mapping is strict. Plain values are renamed,
   and never an error.
4. Names that are tied stay tied if their rules do the same to them. The mapping names tied names
   that a checkpoint may lack: a missing one is added, tied to the other.

Rules of the nest in which renamed leaves lie:

5. A nest whose leaves all change in the same prefix moves as a whole, with its containers.
6. Other leaves leave their containers. A leaf lies in the deepest dict whose name is a dotted
   prefix of its new name, under the rest of the name as one key.
7. A dict of tensors alone stays one: its entries get new keys, also if all get one prefix.
8. Items of a list or tuple that move apart become entries of a dict. Empty containers vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.mapping.members import Group, Indices, Member, Texts, member_of, shared_axes
from ckpt.mapping.rules import Rule, TensorMapping, name_axes, name_with
from ckpt.state.patterns import is_plain, matches, no_name, prefix_in, renamer
from ckpt.state.saved import holds_tensor, leaves
from formats.catalog import Catalog, Key, TensorRecord, TensorRef, Tree, join
from formats.native.tree import ROOT
from sharding.errors import ArgumentError, format_names

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
    def identity(cls, catalog: Catalog) -> Mapped:
        """Returns a catalog in which each name comes from itself."""
        return cls(catalog, {name: (name,) for name, _ in leaves(catalog.tree)})


def map_catalog(before: Mapped, mapping: TensorMapping, parameters: Mapping[str, int]) -> Mapped:
    """Returns a catalog with the new names and shapes. Reads nothing.

    `parameters` has the sizes that the rules name.

    Raises:
        ArgumentError: see the rules above; the message names the mapping, the rule and the names.
    """
    catalog, mapping = before.catalog, mapping.with_numbers(parameters)
    saved = dict(leaves(catalog.tree))
    tied = {
        name: first
        for name, first in mapping.tied.items()
        if name not in saved and isinstance(saved.get(first), TensorRef)
    }
    kept = {
        name: leaf
        for name, leaf in [
            *saved.items(),
            *((name, saved[tied[name]]) for name in tied),
        ]
        if not any(matches(pattern, name) for pattern in mapping.exclude)
    }
    claims = _Claims.of(mapping, kept)
    claims.check_all_rules_match(mapping, list(saved))
    outputs = _outputs(catalog, kept, claims, parameters)
    for name, first in tied.items():
        if name in outputs and first in outputs:
            outputs[first] |= outputs.pop(name)
    tensors, aliases, sources = _name_outputs(outputs, mapping)
    tree = rename_tree(
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
        first for name in saved if name not in kept for first in before.origins.get(name, ())
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
                    if matches(rule.sources[0], name) and _is_met(rule, name, entries):
                        renames[name] = rule, _rename(rule, name)
                        break
                elif isinstance(leaf, TensorRef):
                    member = member_of(rule, name)
                    if member is not None and _is_met(rule, name, entries):
                        members[name] = rule, member
                        break
            else:
                prefix = prefix_in(prefixes, name)
                if prefix is not None:
                    renames[name] = prefixes[prefix], _rename(prefixes[prefix], name)
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


def _is_met(rule: Rule, name: str, entries: Container[str]) -> bool:
    """Whether a name that a rule requires is there, with the texts of a name of its source."""
    if not rule.requires:
        return True
    member = member_of(rule, name)
    texts = member.texts if member is not None else ()
    return any(name_with(required, texts, {}) in entries for required in rule.requires)


def _is_prefix(rule: Rule) -> bool:
    return rule.rearrange is None and is_plain(rule.sources[0])


def _rename(rule: Rule, name: str) -> str:
    return renamer({rule.sources[0]: rule.targets[0]})(name)


def _check_none_left(mapping: TensorMapping, names: Sequence[str]) -> None:
    if names:
        raise ArgumentError(
            f"{mapping.name} has no rule for {format_names(names, SHOWN_NAMES)}: the "
            "checkpoint is of "
            "another model, or holds more: select= takes the model alone, and exclude= leaves "
            "tensors out",
            names=names,
        )


_Named = list[tuple[str, Member]]


def _outputs(
    catalog: Catalog, kept: Mapping[str, Tree], claims: _Claims, parameters: Mapping[str, int]
) -> dict[str, dict[str, _Made]]:
    """Returns the new leaves that stand in the place of each leaf.

    A group has the members of a rule with the same texts. Its first name gives all tensors of the
    group, the others none.
    """
    groups: dict[tuple[int, Texts], _Named] = {}
    for name, (rule, member) in claims.members.items():
        groups.setdefault((id(rule), member.texts), []).append((name, member))
    outputs: dict[str, dict[str, _Made]] = {}
    for name, leaf in kept.items():
        if name in claims.members:
            rule, member = claims.members[name]
            group = groups.pop((id(rule), member.texts), None)
            outputs[name] = (
                {} if group is None else _of_group(catalog, kept, rule, group, parameters)
            )
            continue
        new = claims.renames[name][1] if name in claims.renames else name
        made = _Made((name,), None, None)
        if isinstance(leaf, TensorRef):
            made = _Made((name,), catalog.tensors[leaf.name]._replace(name=new), leaf.name)
        outputs[name] = {new: made}
    return outputs


def _of_group(
    catalog: Catalog,
    kept: Mapping[str, Tree],
    rule: Rule,
    group: _Named,
    parameters: Mapping[str, int],
) -> dict[str, _Made]:
    records: dict[tuple[int, Indices], TensorRecord] = {}
    names: dict[Indices, list[str]] = {}
    stored: dict[Indices, list[str]] = {}
    axes = name_axes(rule.sources[0])
    shared = [axes.index(axis) for axis in shared_axes(rule)]
    for name, member in sorted(group, key=_place):
        ref = kept[name]
        assert isinstance(ref, TensorRef)
        records[member.part, member.indices] = catalog.tensors[ref.name]._replace(name=name)
        place = tuple(member.indices[at] for at in shared)
        names.setdefault(place, []).append(name)
        stored.setdefault(place, []).append(ref.name)
    targets = Group(rule, group[0][1].texts, records, parameters).targets()
    alike = str(rule.rearrange), tuple(rule.sizes.items()), rule.parts
    return {
        new: _Made(tuple(names[place]), record, (*alike, tuple(stored[place]), number))
        for number, (new, (record, place)) in enumerate(targets.items())
    }


def _place(named: tuple[str, Member]) -> tuple[int, Indices]:
    return named[1].part, named[1].indices


def _name_outputs(
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


@dataclass(frozen=True, slots=True)
class Named:
    """A leaf or nest with its new name, and its key in a dict that it lies in."""

    name: str
    tree: Tree
    key: Key


def rename_tree(tree: Tree, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]) -> Tree:
    """Returns a tree with `leaf(name, node)` in the place of each leaf: names with new leaves.

    The leaves are those of `ckpt.state.saved.leaves`. No two new leaves have one name.

    >>> rename_tree({"m": {"a": 1}, "s": 2}, lambda name, node: [(name.replace("m", "net"), node)])
    {'net': {'a': 1}, 's': 2}
    >>> rename_tree({"m": {"a": 1, "b": 2}}, lambda name, node: [(name.replace("a", "c.d"), node)])
    {'m': {'c.d': 1, 'b': 2}}
    """
    entries = _walk(tree, "", leaf)
    whole = len(entries) == 1 and entries[0].name == ""
    return entries[0].tree if whole else _dict_of(entries)


def _walk(
    node: Tree, path: str, leaf: Callable[[str, Tree], Iterable[tuple[str, Tree]]]
) -> list[Named]:
    items = _items(node)
    if items is None:
        name = path or (ROOT if isinstance(node, TensorRef) else "")
        return [Named(new, tree, new) for new, tree in leaf(name, node)]
    below = [(key, item, _walk(item, join(path, key), leaf)) for key, item in items]
    prefix = _common_prefix([(key, entries) for key, _, entries in below])
    is_flat = all(_items(item) is None for _, item, _ in below) and not path
    if prefix is not None and (prefix == path or (prefix and not is_flat)):
        children = [(key, entries[0].tree) for key, _, entries in below]
        return [Named(prefix, _like(node, children), prefix)]
    return _apart(node, path, [(key, entry) for key, _, entries in below for entry in entries])


def _apart(node: Tree, path: str, entries: list[tuple[Key, Named]]) -> list[Named]:
    """Returns the entries of a container that has changed: its rest, and those that leave it."""
    if not isinstance(node, dict):
        return [entry for _, entry in entries]
    start = len(path) + 1 if path else 0
    inside: list[Named] = []
    outside: list[Named] = []
    for key, entry in entries:
        if path and not entry.name.startswith(f"{path}."):
            outside.append(entry)
            continue
        name = entry.name[start:]
        inside.append(Named(name, entry.tree, key if name == str(key) else name))
    return [*([Named(path, _dict_of(inside), path)] if inside or not path else []), *outside]


def _dict_of(entries: list[Named]) -> dict[Key, Tree]:
    """Returns the entries as a dict, in their order; those below another one are put into it."""
    nests = {entry.name for entry in entries if isinstance(entry.tree, dict) and entry.tree}
    tree: dict[Key, Tree] = {}
    below: list[Named] = []
    for entry in entries:
        if prefix_in(nests, entry.name.rpartition(".")[0]):
            below.append(entry)
        elif entry.key in tree:
            raise _is_nest(entry.name)
        else:
            tree[entry.key] = entry.tree
    for entry in below:
        _insert(tree, entry)
    return tree


def _is_nest(name: str) -> ArgumentError:
    return ArgumentError(f"{name} would be both a value and a dict of values; give it another name")


def _common_prefix(below: list[tuple[Key, list[Named]]]) -> str | None:
    """Returns the name of a container whose entries keep their keys; None if they move apart."""
    found: set[str | None] = set()
    for key, entries in below:
        name = f".{entries[0].name}" if len(entries) == 1 else ""
        found.add(name.removesuffix(f".{key}")[1:] if name.endswith(f".{key}") else None)
    return found.pop() if len(found) == 1 else None


def _insert(tree: dict[Key, Tree], entry: Named) -> None:
    """Puts an entry into the deepest dict whose name is a prefix of its own (rule 2)."""
    rest = entry.name
    while (cut := _dict_above(tree, rest)) is not None:
        below = tree[rest[:cut]]
        assert isinstance(below, dict)
        tree, rest = below, rest[cut + 1 :]
    if rest in tree:
        raise _is_nest(entry.name)
    tree[rest] = entry.tree


def _dict_above(tree: dict[Key, Tree], name: str) -> int | None:
    """Returns the end of the longest prefix of a name that is a dict in the tree."""
    cut = name.rfind(".")
    while cut >= 0:
        below = tree.get(name[:cut])
        if isinstance(below, dict) and below:
            return cut
        cut = name.rfind(".", 0, cut)
    return None


def _items(node: Tree) -> list[tuple[Key, Tree]] | None:
    """Returns the entries of a container; None for a leaf."""
    if isinstance(node, dict) and node:
        return list(node.items())
    if isinstance(node, list | tuple) and holds_tensor(node):
        return list(enumerate(node))
    return None


def _like(node: Tree, items: list[tuple[Key, Tree]]) -> Tree:
    if isinstance(node, dict):
        return dict(items)
    values = [tree for _, tree in items]
    return values if isinstance(node, list) else tuple(values)
