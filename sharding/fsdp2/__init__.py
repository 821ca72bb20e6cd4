"""FSDP with one DTensor per parameter: `fully_shard` and `FSDPModule`."""
