"""What the processes of all pools import: once, by the process from which they are forked (conftest.py names it)."""

import gc
from contextlib import suppress

with suppress(ImportError):
    import torch._dynamo  # noqa: F401 (an optimizer of torch imports that part)

    import ringcomm.parallel  # noqa: F401 (all of this is for those who are forked)

gc.collect()
gc.freeze()  # these objects stay: the collector need not visit them again
