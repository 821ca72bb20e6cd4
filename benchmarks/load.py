"""Loading workload A at the world size it was saved with: ckpt beside torch DCP and the raw read.

    python benchmarks/load.py --world-size 2 --store DIR

Everything is loaded into tensors that exist; after the first round every byte is compared.
"""

from __future__ import annotations

import report
import reshard


def tables(options: report.Options) -> list[report.Table]:
    """One table, a block of rows for each world size."""
    rows = []
    for world_size in options.world_sizes:
        samples, needed = reshard.samples(options, world_size, world_size)
        rows += report.rows(str(world_size), samples, reshard.over_needed(needed))
    columns = report.columns("W", "bytes read ÷ needed")
    return [report.Table(f"Load, {options.gib:g} GiB, {options.where}", columns, rows)]


if __name__ == "__main__":
    report.main(__doc__, tables)
