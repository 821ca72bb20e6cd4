"""The native format: safetensors shards with checksums of all bytes, and one JSON manifest."""
