"""Plans as values: the bytes that each rank reads, writes and sends. No torch, store or ranks."""
