"""What the processes of all pools import: once, by the process from which they are forked (conftest.py names it)."""

import gc
from contextlib import suppress

import numpy as np  # noqa: F401 (all of this is for those who are forked)
import pytest  # noqa: F401

with suppress(ImportError):
    import torch._dynamo  # noqa: F401 (an optimizer of torch imports that part)

gc.collect()
gc.freeze()  # these objects stay: the collector need not visit them again
