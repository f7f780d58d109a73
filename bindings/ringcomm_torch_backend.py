"""What torch loads at `import torch`, by the entry point "torch.backends": it must be light, and it never raises.

It makes `dist.init_process_group("ringcomm")` work without an import of ringcomm; the backend itself is ringcomm.torch.
"""

NAME = "ringcomm"


def register():
    """Tell torch.distributed about the backend. Where it cannot be told, naming the backend is an error of torch."""
    try:
        from torch.distributed import Backend

        if not hasattr(Backend, NAME.upper()):
            Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # torch without distributed, or of another age: importing it must go on
        pass


def create(options, _=None):
    """Return the group that torch asks for."""
    from ringcomm.torch.group import create

    return create(options)
