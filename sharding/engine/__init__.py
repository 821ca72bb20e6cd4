"""What runs while a sharded module trains: gathered, computed with, reduced, let go of.

The front doors beside this package (`per_parameter`, `wrapper`, `composable`) put it together.
"""
