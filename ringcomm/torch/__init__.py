"""The torch.distributed backend "ringcomm": `dist.init_process_group("ringcomm")` in place of "gloo".

Importing this module registers the backend; so does `import torch` where ringcomm is installed, through the entry point
"torch.backends". Tensors are used in place, on the CPU and on GPUs.
"""

from ringcomm_torch_backend import register

from ringcomm.torch.elastic import grow, init_process_group, load_latest, shrink
from ringcomm.torch.local_tensors import local_tensors
from ringcomm.torch.memory import symmetric_memory
from ringcomm.torch.rms_norm import all_reduce_rms_norm
from ringcomm.torch.shared import shared_arrays, shared_empty
from ringcomm.torch.steps import step

__all__ = [
    "all_reduce_rms_norm",
    "grow",
    "init_process_group",
    "load_latest",
    "local_tensors",
    "shared_arrays",
    "shared_empty",
    "shrink",
    "step",
    "symmetric_memory",
]

register()
