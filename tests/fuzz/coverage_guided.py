"""Coverage-guided fuzzing of one reader with atheris: by hand, not in CI.

    python tests/fuzz/coverage_guided.py --corpus CORPUS          # once, where torch is
    python tests/fuzz/coverage_guided.py READER CORPUS/READER -max_total_time=600

atheris (`pip install atheris`, for Python 3.11) may be in an environment without torch. READER is
one of `manifest`, `shard`, `safetensors`, `index`, `zip`, `pickle` and `metadata`; what follows
goes to libFuzzer. An input that no reader may fail on ends the run and is written to a file; one
that takes over 20 s does as well. What is found becomes a test.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

SHARED = "shared.pickle"
"""The files around those that are changed: a dict of folders by reader, written with the corpus."""


LATE = (
    *(
        "formats.torch_save",
        "formats.dcp",
        "formats.safetensors.huggingface",
        "formats.native.reader",
    ),
    *("formats.native.codec", "formats.native.manifest"),
    "ckpt.checking.verify",
)
"""What is imported when it is first needed, and has to be instrumented."""


def write_corpus(folder: Path) -> None:
    """Sound inputs for every reader."""
    from tests.fuzz.mutations import taken_apart, unzipped
    from tests.fuzz.seeds import seeds

    found: dict[str, list[bytes]] = {}
    around = {}
    for seed in seeds():
        for name, data in seed.files.items():
            if name == "manifest.json":
                found.setdefault("manifest", []).append(b"{" + data[45:])
                around["manifest"] = seed.files
            elif seed.kind == "native" and "/" not in name:
                found.setdefault("shard", []).append(data)
            elif seed.kind == "safetensors":
                found.setdefault("safetensors", []).append(data)
            elif name.endswith(".index.json"):
                found.setdefault("index", []).append(data)
                around["index"] = seed.files
            elif seed.kind == "torch":
                found.setdefault("zip", []).append(data)
                records = unzipped(data)
                pickled = next(each for each in records if each.endswith("/data.pkl"))
                found.setdefault("pickle", []).append(records[pickled])
            elif name == ".metadata":
                found.setdefault("metadata", []).append(data)
                around["metadata"] = seed.files
    native = next(seed for seed in seeds() if seed.kind == "native")
    around["shard"] = native.files
    assert taken_apart(found["shard"][0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SHARED).write_bytes(pickle.dumps(around))
    for reader, inputs in found.items():
        (folder / reader).mkdir(exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / reader / f"seed-{number}").write_bytes(data)


def targets(around: dict[str, dict[str, bytes]]) -> dict[str, Callable[[bytes], object]]:
    """What is done with an input, by reader."""
    import xxhash

    from tests.fuzz.folders import exercise
    from tests.fuzz.mutations import signed, zipped

    def manifest(data: bytes) -> object:
        return exercise({**around["manifest"], "manifest.json": signed(b"{" + data[1:])})

    def shard(data: bytes) -> object:
        files = dict(around["shard"])
        content = json.loads(files["manifest.json"])
        del content["digest"]
        entry = content["files"][0]
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        table_bytes = min(entry[4], len(data))
        if header_bytes + table_bytes > len(data):
            return None
        digest = xxhash.xxh3_128_hexdigest(data[:header_bytes] + data[len(data) - table_bytes :])
        entry[2:] = [len(data), header_bytes, table_bytes, digest]
        files[entry[0]] = data
        files["manifest.json"] = signed(json.dumps(content).encode())
        return exercise(files)

    return {
        "manifest": manifest,
        "shard": shard,
        "safetensors": lambda data: exercise({"a.safetensors": data}, "a.safetensors"),
        "index": lambda data: exercise({**around["index"], "model.safetensors.index.json": data}),
        "zip": lambda data: exercise({"a.pt": b"PK\x03\x04" + data[4:]}, "a.pt"),
        "pickle": lambda data: exercise({"a.pt": zipped({"a/data.pkl": data})}, "a.pt"),
        "metadata": lambda data: exercise({**around["metadata"], ".metadata": data}),
    }


def fuzz(reader: str, corpus: Path, options: list[str]) -> None:
    """Never returns."""
    import atheris

    with atheris.instrument_imports(include=["formats", "sharding.layout", "ckpt"]):
        for module in LATE:
            importlib.import_module(module)
        target = targets(pickle.loads((corpus.parent / SHARED).read_bytes()))[reader]
    arguments = [sys.argv[0], "-timeout=20", "-rss_limit_mb=3000", *options, str(corpus)]
    atheris.Setup(arguments, lambda data: target(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--corpus":
        write_corpus(Path(sys.argv[2]))
    else:
        fuzz(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
