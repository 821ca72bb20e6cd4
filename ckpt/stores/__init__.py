"""Folders of files, wherever they are: a local disk, a bucket, whatever fsspec can open.

`store.open_store` is the way in. What a store is asked for and what it promises is the same for
all; `tests/stores` holds them to it.
"""
