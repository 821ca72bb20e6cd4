"""Layouts of torch's tensors, modules and optimizers, in the words of `sharding.layout`.

Nothing here communicates.
"""
