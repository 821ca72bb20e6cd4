"""The version of the package, as it stands in manifests and in `ckpt --version`."""

__version__ = "0.2.0"
