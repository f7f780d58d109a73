"""The torch.distributed backend "ringcomm": after `dist.init_process_group("ringcomm")` all runs that runs on Gloo.

Importing this module registers the backend. Where ringcomm is installed `import torch` does that too, by the entry
point "torch.backends". Tensors on the CPU are used in place; those on a GPU need the CUDA transport, which is not built
yet.
"""

from ringcomm_torch_backend import register

from ringcomm.torch.labels import enable_profiler_labels

__all__ = ["enable_profiler_labels"]

register()
