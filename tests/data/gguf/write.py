"""Writes small.gguf with the gguf package: `python tests/data/gguf/write.py`."""

from pathlib import Path

import gguf
import numpy as np


def main() -> None:
    writer = gguf.GGUFWriter(Path(__file__).with_name("small.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "▁a", "é"])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_token_types([3, 1, 1])
    writer.add_add_bos_token(True)
    writer.add_int64("test.int64", -3)
    writer.add_uint8("test.uint8", 7)
    numbers = np.arange(12).reshape(3, 4)
    for name, dtype in (("f32", "f4"), ("f16", "f2"), ("i8", "i1")):
        writer.add_tensor(f"{name}.weight", numbers.astype(dtype))
    bf16 = (numbers.astype("f4").view("u4") >> 16).astype("u2").view("u1")
    writer.add_tensor("bf16.weight", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    rows = np.arange(128, dtype="f4").reshape(2, 64)
    for name, kind in (("q8", "Q8_0"), ("q4", "Q4_0")):
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
