"""Pickles as data: read without imports, calls or code of the file, and written for torch."""
