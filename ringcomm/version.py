"""The version, which pyproject.toml reads here: to read the metadata of the package takes 20 ms more at each start."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
