"""The module MPI of mpi4py."""  # noqa: N999

from ringcomm.mpi4py.base.buffer import *  # noqa: F403
from ringcomm.mpi4py.base.constants import *  # noqa: F403
from ringcomm.mpi4py.base.errhandlers import *  # noqa: F403
from ringcomm.mpi4py.base.errors import *  # noqa: F403
from ringcomm.mpi4py.base.info import *  # noqa: F403
from ringcomm.mpi4py.base.unsupported import *  # noqa: F403
from ringcomm.mpi4py.base.unsupported import _addressof, _commctx_inter, _handleof, _sizeof  # noqa: F401
from ringcomm.mpi4py.calls.message import *  # noqa: F403
from ringcomm.mpi4py.calls.op import *  # noqa: F403
from ringcomm.mpi4py.calls.pickling import *  # noqa: F403
from ringcomm.mpi4py.comm.comm import *  # noqa: F403
from ringcomm.mpi4py.comm.intracomm import *  # noqa: F403
from ringcomm.mpi4py.comm.topocomm import *  # noqa: F403
from ringcomm.mpi4py.datatypes.datatype import CODES as _typedict  # noqa: F401, N811
from ringcomm.mpi4py.datatypes.datatype import Datatype  # noqa: F401
from ringcomm.mpi4py.datatypes.predefined import *  # noqa: F403
from ringcomm.mpi4py.datatypes.predefined import C_CODES as _typedict_c  # noqa: F401, N811
from ringcomm.mpi4py.datatypes.predefined import F_CODES as _typedict_f  # noqa: F401, N811
from ringcomm.mpi4py.datatypes.predefined import typecode as _typecode  # noqa: F401
from ringcomm.mpi4py.environment import *  # noqa: F403
from ringcomm.mpi4py.environment import _comm_lock, _comm_lock_table, _commctx_intra  # noqa: F401
from ringcomm.mpi4py.environment import start as _start
from ringcomm.mpi4py.groups.group import *  # noqa: F403
from ringcomm.mpi4py.groups.topology import Compute_dims  # noqa: F401
from ringcomm.mpi4py.requests.request import *  # noqa: F403
from ringcomm.mpi4py.requests.status import *  # noqa: F403

for _value in list(globals().values()):  # pickle, and the repr of classes, name this module
    if getattr(_value, "__module__", "").startswith("ringcomm.mpi4py.") and hasattr(_value, "__name__"):
        _value.__module__ = __name__

_start()
