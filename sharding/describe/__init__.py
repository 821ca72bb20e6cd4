"""Layouts of torch's tensors, modules and optimizers, by `sharding.layout`.

No function here communicates.
"""
