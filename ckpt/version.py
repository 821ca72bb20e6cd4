"""The version of the package, as it stands in manifests and in `ckpt --version`."""

__version__ = "0.1.0"
