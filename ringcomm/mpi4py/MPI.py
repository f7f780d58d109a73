"""The module MPI of mpi4py."""  # noqa: N999

from ringcomm.mpi4py.comm import *  # noqa: F403
from ringcomm.mpi4py.constants import *  # noqa: F403
from ringcomm.mpi4py.datatype import CODES as _typedict  # noqa: F401, N811
from ringcomm.mpi4py.datatype import Datatype  # noqa: F401
from ringcomm.mpi4py.environment import *  # noqa: F403
from ringcomm.mpi4py.environment import _comm_lock, _comm_lock_table, _commctx_intra  # noqa: F401
from ringcomm.mpi4py.environment import start as _start
from ringcomm.mpi4py.errors import *  # noqa: F403
from ringcomm.mpi4py.group import *  # noqa: F403
from ringcomm.mpi4py.info import *  # noqa: F403
from ringcomm.mpi4py.intracomm import *  # noqa: F403
from ringcomm.mpi4py.memory import *  # noqa: F403
from ringcomm.mpi4py.message import *  # noqa: F403
from ringcomm.mpi4py.op import *  # noqa: F403
from ringcomm.mpi4py.pickling import *  # noqa: F403
from ringcomm.mpi4py.predefined import *  # noqa: F403
from ringcomm.mpi4py.predefined import C_CODES as _typedict_c  # noqa: F401, N811
from ringcomm.mpi4py.predefined import F_CODES as _typedict_f  # noqa: F401, N811
from ringcomm.mpi4py.predefined import typecode as _typecode  # noqa: F401
from ringcomm.mpi4py.request import *  # noqa: F403
from ringcomm.mpi4py.status import *  # noqa: F403
from ringcomm.mpi4py.topocomm import *  # noqa: F403
from ringcomm.mpi4py.topology import Compute_dims  # noqa: F401
from ringcomm.mpi4py.unsupported import *  # noqa: F403
from ringcomm.mpi4py.unsupported import _addressof, _commctx_inter, _handleof, _sizeof  # noqa: F401

for _value in list(globals().values()):  # pickle, and the repr of classes, name this module
    if getattr(_value, "__module__", "").startswith("ringcomm.mpi4py.") and hasattr(_value, "__name__"):
        _value.__module__ = __name__

_start()
