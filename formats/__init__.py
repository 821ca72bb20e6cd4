"""All checkpoint formats: readers that return a catalog, and writers that take streams."""
