"""The torch.distributed backend "ringcomm": after `dist.init_process_group("ringcomm")` all runs that runs on Gloo.

Importing this module registers the backend. Where ringcomm is installed `import torch` does that too, by the entry
point "torch.backends". Tensors are used in place, on the CPU and on GPUs.
"""

from ringcomm_torch_backend import register

from ringcomm.torch.labels import enable_profiler_labels

__all__ = ["enable_profiler_labels"]

register()
