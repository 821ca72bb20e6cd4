"""A state as this package sees it: named tensors with their layouts, and the tree around them."""
