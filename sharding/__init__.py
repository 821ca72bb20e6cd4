"""Which rank holds which piece of which tensor: `sharding.layout`, the algebra, knows no torch.

`sharding.dtensor` describes torch's tensors in its terms.
"""
