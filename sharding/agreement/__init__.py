"""Exchanges of the processes of a job: one answer or one error on all ranks, in time."""
