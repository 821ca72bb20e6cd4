"""The native format: safetensors shards that verify themselves, and one JSON manifest."""
