"""Any place as a catalog, and the saves of this process that are not yet there."""
