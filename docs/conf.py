"""Sphinx: the pages of this folder, and the API reference from the docstrings. `.ci/run` builds it with -W."""

from importlib.metadata import version as installed

project = "ringcomm"
author = "ringcomm contributors"
version = release = installed("ringcomm")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links out of docs/; tests/project/test_docs.py checks every link
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # a default of Config names its environment variable, not this machine's value
