"""The page of `ckpt inspect --html` and `ckpt diff --html`: one file that needs no network."""
