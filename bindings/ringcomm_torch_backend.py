"""Registers the backend at `import torch`, through the entry point "torch.backends": light, and never raises.

So `dist.init_process_group("ringcomm")` works without importing ringcomm; the backend itself is ringcomm.torch.
"""

import os
import warnings
from functools import wraps

NAME = "ringcomm"


def register():
    """Register the backend with torch.distributed. If that fails, torch refuses the name of the backend."""
    try:
        from torch.distributed import Backend, distributed_c10d

        if not hasattr(Backend, NAME.upper()):
            Backend.register_backend(NAME, create, extended_api=True, devices=devices())
            serve_set_pg_timeout(distributed_c10d)
            become_default(Backend)
    except Exception:  # torch without distributed, or another version: the import must go on
        pass


def devices():
    """Return the kinds of device that the backend serves and this build of torch has."""
    from torch.backends import cuda

    return ["cpu", "cuda"] if cuda.is_built() else ["cpu"]


def become_default(backend):
    """Make torch choose the backend for tensors on the CPU if RINGCOMM_TORCH_DEFAULT asks for it."""
    if "RINGCOMM_TORCH_DEFAULT" in os.environ:  # else ringcomm is not loaded yet
        from ringcomm.config import is_torch_default

        try:
            if is_torch_default():
                backend.default_device_backend_map["cpu"] = NAME
        except ValueError as error:
            warnings.warn(str(error), stacklevel=1)


def serve_set_pg_timeout(c10d):
    """Make torch's `_set_pg_timeout` serve the backend too: it looks for the classes of Gloo and NCCL."""
    theirs = c10d._set_pg_timeout

    @wraps(theirs)
    def _set_pg_timeout(timeout, group=None):
        group = group or c10d._get_default_group()
        backends = c10d.BackendConfig(c10d.Backend(c10d.get_backend_config(group))).get_device_backend_map()
        if NAME in backends.values():
            group.set_timeout(timeout)
        else:
            theirs(timeout, group)

    c10d._set_pg_timeout = _set_pg_timeout


def create(options, _=None):
    """Return the process group for torch's DistributedBackendOptions."""
    from ringcomm.torch.process_group import create

    return create(options)
