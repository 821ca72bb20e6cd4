"""A save: its agreement between the ranks, and the saves that go on beside the training."""
