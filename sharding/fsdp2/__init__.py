"""FSDP with one DTensor per parameter: `fully_shard`, `FSDPModule` and their state dicts."""
