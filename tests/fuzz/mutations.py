"""Sound checkpoints made hostile: every part changed, and what vouches for it put right again.

A change of a random byte seldom gets past a checksum. So each format is taken apart into what a
hostile writer would choose (JSON, opcodes of a pickle, records of a zip, chunk tables), one part is
changed, and the rest is put together around it: sizes, digests and checksums agree.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import xxhash

from formats.native.borrowed import BORROWED, DELTAS
from formats.native.manifest import MANIFEST
from formats.native.shard import RECORD, TABLE
from tests.fuzz.folders import Files

if TYPE_CHECKING:
    from tests.fuzz.seeds import Seed

NUMBERS = (
    *(0, 1, 2, 3, 7, 16, 64, 255, 256, 4095, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**53, 2**61 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1, 2**64, 10**40),
    *(10**400, -1, -2, -(2**31), -(2**63), -(2**64)),
)
TEXTS = (
    *("", "w", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", ".", "a\0b", "\x1b[2J", "é"),
    *("__chunks__", "__metadata__", "manifest.json", "model.safetensors", "x" * 5000, "\u202e"),
    *("F32", "U8", "F4", "F6_E2M3", "C128", "BF16", "split", "R", "S(0)", "SS(0,9)", "F(0,3)"),
    *("only(1)", "zstd", "raw", "0", "64", "-1", "1e9", "9" * 30, "nan"),
)
LITERALS = ("NaN", "-Infinity", "1e999", "-0", "1.5", "true", '"\\ud800"', "9" * 5000, "[" * 2000)


class Literal(str):
    """JSON that stands in the text as it is."""


class Twice(dict[str, Any]):
    """An object that has its first key twice."""


def text(node: Any) -> str:
    """The JSON of a tree that may have literals and keys twice."""
    if isinstance(node, Literal):
        return node
    if isinstance(node, dict):
        pairs = [f"{json.dumps(key)}:{text(item)}" for key, item in node.items()]
        return "{" + ",".join(pairs[:1] * isinstance(node, Twice) + pairs) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(text, node)) + "]"
    return json.dumps(node)


def value(random: Random) -> Any:
    """Something that may stand anywhere in JSON."""
    return random.choice(
        (
            lambda: random.choice(NUMBERS),
            lambda: random.choice(TEXTS),
            lambda: Literal(random.choice(LITERALS)),
            lambda: random.choice((None, True, False, [], {}, [[]], 1.0, 2.0**70)),
            lambda: [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 3, 70)))],
            lambda: {random.choice(TEXTS): random.choice(NUMBERS)},
            lambda: {"$tensor": ["F32", [random.choice(NUMBERS)], 0]},
            lambda: {"$alias": random.choice(TEXTS)},
            lambda: {"$dict": [[{"$tuple": [random.choice(NUMBERS)]}, 1], [1, 2]]},
            lambda: {random.choice(("$tuple", "$dict", "$bytes", "$float", "$dtype", "$x")): []},
        )
    )()


def changed_json(node: Any, random: Random) -> Any:
    """The tree with one place changed."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = list(node.items() if isinstance(node, dict) else enumerate(node))
        for key, item in items:
            places.append((node, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(node)
    if not places:
        return value(random)
    holder, key = random.choice(places)
    other_holder, other_key = random.choice(places)
    action = random.randrange(7)
    if action == 0:
        del holder[key]
    elif action == 1:
        holder[key], other_holder[other_key] = other_holder[other_key], holder[key]
        if _holds_itself(node, 0):
            return value(random)
    elif action == 2 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif action == 2:
        holder[random.choice(TEXTS)] = holder.pop(key)
    elif action == 3 and isinstance(holder[key], dict):
        holder[key] = Twice(holder[key])
    elif action == 4 and isinstance(holder[key], int):
        holder[key] += random.choice((-1, 1, 2, -8, 64, 2**32, 2**63, 2**64))
    else:
        holder[key] = value(random)
    return node


def _holds_itself(node: Any, depth: int) -> bool:
    items = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return depth > 300 or any(_holds_itself(item, depth + 1) for item in items)


def changed_bytes(data: bytes, random: Random) -> bytes:
    """The bytes with one to three places changed."""
    found = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(found) + 1)
        span = random.choice((1, 1, 2, 4, 8, 20, 100))
        action = random.randrange(6)
        if action == 0 and found:
            found[at % len(found)] ^= 1 << random.randrange(8)
        elif action == 1:
            del found[at : at + span]
        elif action == 2:
            found[at:at] = random.randbytes(span)
        elif action == 3:
            found[at:at] = found[at : at + span]
        elif action == 4:
            width = random.choice((1, 2, 4, 8))
            number = random.choice(NUMBERS) % (1 << 8 * width)
            found[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
        else:
            start = random.randrange(len(found) + 1)
            found[at : at + span] = found[start : start + span]
    return bytes(found)


# Pickles, opcode by opcode.

SNIPPETS = (
    *(b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"(", b"0", b"1", b"2", b"\x94", b"\x85", b"\x86"),
    *(b"\x87", b"t", b"a", b"e", b"s", b"u", b"\x90", b"\x91", b"R", b"\x81", b"\x92", b"b", b"Q"),
    *(b".", b"\x93", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"h\x00", b"h\x01"),
    *(b"j\xff\xff\xff\xff", b"q\x00", b"r\xff\xff\xff\x7f", b"K\x00", b"K\xff", b"M\xff\xff"),
    *(b"J\xff\xff\xff\xff", b"J\x00\x00\x00\x80", b"\x8a\x08" + b"\xff" * 7 + b"\x7f"),
    *(b"\x8a\x09" + b"\x00" * 8 + b"\x01", b"\x8b\x00\x04\x00\x00" + b"\x7f" * 1024),
    *(b"\x8b\xff\xff\xff\x7f", b"G" + b"\xff" * 8, b"X\x01\x00\x00\x00w", b"X\xff\xff\xff\xff"),
    *(
        b"X\x03\x00\x00\x00\xed\xa0\x80",
        b"\x8c\x02..",
        b"\x8d" + b"\xff" * 8,
        b"B\x01\x00\x00\x00x",
    ),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__builtin__\nset\n", b"cbuiltins\nbytearray\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"),
    *(
        b"c_codecs\nencode\n",
        b"cbuiltins\ncomplex\n",
        b"ctorch\ndevice\n",
        b"cpathlib\nPosixPath\n",
    ),
    *(b"ctorch._utils\n_rebuild_parameter\n", b"ctorch._tensor\n_rebuild_from_type_v2\n"),
    *(b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n", b"\x80\x05", b"\x95" + bytes(8)),
    *(b"Vx\n", b"I1\n", b"i\n\n", b"P0\n", b"ccollections\ndefaultdict\n"),
)


def opcodes(data: bytes) -> list[bytes]:
    """The opcodes of a sound pickle, each with its argument."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return [data[lo:hi] for lo, hi in zip(starts, [*starts[1:], len(data)], strict=True)]


def changed_pickle(data: bytes, random: Random) -> bytes:
    """The pickle with one to three opcodes changed."""
    steps = opcodes(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(steps))
        action = random.randrange(6)
        if action == 0:
            del steps[at]
        elif action == 1:
            steps.insert(at, random.choice(SNIPPETS))
        elif action == 2:
            steps[at] = random.choice(SNIPPETS)
        elif action == 3:
            other = random.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        elif action == 4:
            stop = at + random.choice((1, 2, 3, 10, 50))
            steps[at:at] = steps[at:stop] * random.choice((1, 1, 20))
        elif len(steps[at]) > 1:
            steps[at] = steps[at][:1] + changed_bytes(steps[at][1:], random)
        if not steps:
            break
    return b"".join(steps)


# Zips.


def unzipped(data: bytes) -> dict[str, bytes]:
    """The records of a sound zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of these records, their checksums right."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return target.getvalue()


def changed_zip(data: bytes, random: Random) -> bytes:
    """A zip of torch.save with its pickle, a record or its structure changed."""
    action = random.randrange(10)
    if action < 6:
        records = unzipped(data)
        name = next(name for name in records if name.endswith("/data.pkl"))
        records[name] = changed_pickle(records[name], random)
        return zipped(records)
    if action == 6:
        records = unzipped(data)
        name = random.choice(list(records))
        if random.random() < 0.5:
            records[name] = changed_bytes(records[name], random)
        else:
            folder = name.split("/")[0]
            records[random.choice((f"{folder}/data/0", "../x", "/x", f"{folder}/version"))] = b"1"
            del records[name]
        return zipped(records, random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    return _changed_directory(data, random)


def _changed_directory(data: bytes, random: Random) -> bytes:
    """A zip with a field of its directory or of a local header changed."""
    found = bytearray(data)
    places = [at for at in range(len(data) - 3) if data[at : at + 2] == b"PK"]
    at = random.choice(random.choice((places[-10:], places))) + random.randrange(60)
    width = random.choice((1, 2, 4, 8))
    number = random.choice((random.choice(NUMBERS), random.choice(places), len(data)))
    found[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(found)


def changed_npz(data: bytes, random: Random) -> bytes:
    """A zip of arrays with a header, a record or its structure changed."""
    if random.random() < 0.3:
        return _changed_directory(data, random)
    records = unzipped(data)
    name = random.choice(list(records))
    records[name] = changed_npy(records[name], random)
    return zipped(records, random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def changed_npy(data: bytes, random: Random) -> bytes:
    """An array of numpy with its header or its bytes changed."""
    if random.random() < 0.4:
        return changed_bytes(data, random)
    length = int.from_bytes(data[8:10], "little")
    header, rest = data[10 : 10 + length], data[10 + length :]
    parts = re.split(rb"(\d+|<\w+|True|False)", header)
    at = random.randrange(len(parts))
    words = (b"<f4", b"|O", b">i8", b"True", b"-1", b"9" * 30, b"4" * 5000, b"(", b"[", b"__")
    parts[at] = random.choice((*words, str(random.choice(NUMBERS)).encode()))
    header = b"".join(parts)
    return data[:8] + (len(header) % 2**16).to_bytes(2, "little") + header + rest


def changed_gguf(data: bytes, random: Random) -> bytes:
    """A GGUF file with numbers of its header changed, or any bytes."""
    if random.random() < 0.4:
        return changed_bytes(data, random)
    found = bytearray(data)
    places = [at for at in range(4, len(data) - 8) if not any(data[at + 2 : at + 4])]
    at, width = random.choice(places), random.choice((4, 8))
    number = random.choice((*NUMBERS, *range(50)))
    found[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(found)


def changed_row(data: bytes, random: Random) -> bytes:
    """A row of pickles with one of them, or the bytes behind them, changed."""
    at, pieces = 0, []
    while data[at : at + 1] == b"\x80" and len(pieces) < 5:
        end = max(place for _, _, place in pickletools.genops(data[at:])) + 1
        pieces.append(data[at : at + end])
        at += end
    chosen = random.randrange(len(pieces) + 1)
    if chosen == len(pieces):
        return data[:at] + changed_bytes(data[at:], random)
    pieces[chosen] = changed_pickle(pieces[chosen], random)
    return b"".join(pieces) + data[at:]


# Safetensors.


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a sound safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(header: Any, data: bytes) -> bytes:
    """A safetensors file of this header."""
    encoded = text(header).encode("utf-8", "surrogatepass")
    encoded += b" " * (-(8 + len(encoded)) % 64)
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with its header, its metadata or its bytes changed."""
    if random.random() < 0.2:
        return changed_bytes(data, random)
    header, rest = taken_apart(data)
    ours = [key for key in header.get("__metadata__", {}) if key.startswith("ckpt.")]
    if ours and random.random() < 0.3:
        key = random.choice(ours)
        inner = changed_json(json.loads(header["__metadata__"][key]), random)
        header["__metadata__"][key] = text(inner)
    else:
        header = changed_json(header, random)
    if random.random() < 0.1:
        rest = changed_bytes(rest, random)
    return put_together(header, rest)


# Ours.


def signed(body: bytes) -> bytes:
    """A manifest of this JSON object with the digest that belongs to it."""
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"digest":"' + digest + b'",' + body[1:]


def changed_native(files: Files, random: Random) -> Files:
    """A native checkpoint with its manifest or a shard file changed, all digests right."""
    manifest = json.loads(files[MANIFEST])
    del manifest["digest"]
    found = dict(files)
    if random.random() < 0.5 and manifest["files"]:
        entry = random.choice(manifest["files"])
        shard, header_bytes, table_bytes = _changed_shard(files[entry[0]], entry[4], random)
        head, table = shard[:header_bytes], shard[len(shard) - table_bytes :]
        digest = xxhash.xxh3_128_hexdigest(head + table)
        entry[2:6] = [len(shard), header_bytes, table_bytes, digest]
        found[entry[0]] = shard
    else:
        manifest = changed_json(manifest, random)
    body = text(manifest).encode("utf-8", "surrogatepass")
    found[MANIFEST] = signed(body)
    return found


def _changed_shard(shard: bytes, table_bytes: int, random: Random) -> tuple[bytes, int, int]:
    """A changed shard file, with the bytes of its header and of its tables."""
    header, data = taken_apart(shard)
    action = random.randrange(4)
    if action == 0:
        header = changed_json(header, random)
    elif action == 1:  # a table: its records, or its length
        name = random.choice([each for each in (TABLE, BORROWED, DELTAS) if each in header])
        lo, hi = header[name]["data_offsets"]
        part = changed_bytes(data[lo:hi], random)
        if random.random() < 0.7:
            part = part[: hi - lo].ljust(hi - lo, b"\0")
        data, grown = data[:lo] + part + data[hi:], len(part) - (hi - lo)
        table_bytes += grown
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                entry["data_offsets"] = [begin + grown * (begin >= hi), end + grown * (end >= hi)]
        header[name]["shape"] = [len(part)]
    else:  # data, with checksums that fit again
        lo, hi = header[TABLE]["data_offsets"]
        raw = changed_bytes(data[: len(data) - table_bytes], random)
        raw = raw[: len(data) - table_bytes].ljust(len(data) - table_bytes, b"\0")
        data = raw + data[len(raw) :]
        records, at = b"", 0
        for digest, stored in RECORD.iter_unpack(data[lo:hi]):
            here = data[at : at + stored]
            fits = action == 3 or xxhash.xxh3_128_digest(here) == digest
            digest = xxhash.xxh3_128_digest(here) if fits else digest
            records, at = records + RECORD.pack(digest, stored), at + stored
        data = data[:lo] + records + data[hi:]
    found = put_together(header, data)
    return found, len(found) - len(data), table_bytes


# DCP.


def changed_dcp(files: Files, random: Random) -> Files:
    """A folder of DCP with its metadata or the items of a file changed."""
    found = dict(files)
    action = random.randrange(4)
    if action < 2:
        found[".metadata"] = changed_pickle(files[".metadata"], random)
        return found
    if action == 2:
        name = random.choice(list(files))
        found[name] = changed_bytes(files[name], random)
        return found
    metadata = pickle.loads(files[".metadata"])
    placed = metadata.storage_data
    chosen = random.choice(list(placed))
    name = placed[chosen].relative_path
    data = b""
    for index, info in placed.items():
        if info.relative_path == name:
            item = files[name][info.offset : info.offset + info.length]
            if index == chosen:
                item = changed_zip(item, random)
            placed[index] = type(info)(name, len(data), len(item))
            data += item
    found[name] = data
    found[".metadata"] = pickle.dumps(metadata, protocol=random.choice((2, 4)))
    return found


def hostile(number: int) -> tuple[Seed, Files]:
    """A sound checkpoint and what became of it; the same for the same number."""
    from tests.fuzz.seeds import seeds  # needs torch, as nothing else here does

    random = Random(number)
    seed = random.choice(seeds())
    return seed, changed(seed, random)


def changed(seed: Seed, random: Random) -> Files:
    """The files of a seed, changed."""
    files = dict(seed.files)
    if seed.kind == "native":
        return changed_native(files, random)
    if seed.kind == "dcp":
        return changed_dcp(files, random)
    name = random.choice(list(files))
    kind = _kind_in(name, files[name]) if seed.kind == "folder" else seed.kind
    by_kind: dict[str, Callable[[bytes, Random], bytes]] = {
        "safetensors": changed_safetensors,
        "torch": changed_zip,
        "hf": changed_safetensors,
        "pickle": changed_pickle,
        "bytes": changed_bytes,
        "row": changed_row,
        "npz": changed_npz,
        "npy": changed_npy,
        "gguf": changed_gguf,
    }
    if name.endswith((".json", "_METADATA", ".zarray")):
        files[name] = text(changed_json(json.loads(files[name]), random)).encode()
    else:
        files[name] = by_kind[kind](files[name], random)
    return files


def _kind_in(name: str, data: bytes) -> str:
    """The kind of a file in a folder with files of several kinds."""
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith((".metadata", "metadata.pkl")):
        return "pickle"
    is_zip = data.startswith(b"PK") and not name.endswith(".distcp")  # of which each has many
    return "torch" if is_zip else "bytes"
