"""The garbage of the tests' own process, which has many objects: a pass over all takes a second."""

import gc


def collect_garbage() -> None:
    """Free what nothing refers to. Later passes leave out the objects that are alive now."""
    gc.collect()
    gc.freeze()
