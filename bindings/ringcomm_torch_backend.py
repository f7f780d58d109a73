"""Registers the backend at `import torch`, through the entry point "torch.backends": light, and never raises.

So `dist.init_process_group("ringcomm")` works without importing ringcomm; the backend itself is ringcomm.torch.
"""

NAME = "ringcomm"


def register():
    """Register the backend with torch.distributed. If that fails, torch refuses the name of the backend."""
    try:
        from torch.distributed import Backend

        if not hasattr(Backend, NAME.upper()):
            Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # torch without distributed, or another version: the import must go on
        pass


def create(options, _=None):
    """Return the process group for torch's DistributedBackendOptions."""
    from ringcomm.torch.process_group import create

    return create(options)
