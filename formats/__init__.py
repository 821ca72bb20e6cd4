"""What bytes mean: every checkpoint format, read into one catalog and written from one stream."""
