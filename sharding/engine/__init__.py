"""What runs while a sharded module trains: gathered, computed with, reduced, let go of.

`sharding.fsdp1`, `sharding.fsdp2` and `sharding.composable` build it from a user's module.
"""
