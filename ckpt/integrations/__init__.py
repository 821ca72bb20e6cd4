"""Training libraries: one file for each turns the library's hooks into saves and loads of ckpt."""
