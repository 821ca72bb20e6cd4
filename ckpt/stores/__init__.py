"""Stores: folders of files on a local disk, in a bucket, or behind any fsspec file system.

`store.open_store` opens a store. All stores have one interface and one contract, which
`tests/stores` checks.
"""
