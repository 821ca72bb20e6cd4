"""Plans as values: who reads, writes and sends which bytes. No torch, no store, no ranks."""
