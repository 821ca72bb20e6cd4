"""Saves that go on while the training does."""
