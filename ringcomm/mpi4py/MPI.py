"""The module MPI of mpi4py."""

from ringcomm.mpi4py.base.buffer import *
from ringcomm.mpi4py.base.constants import *
from ringcomm.mpi4py.base.errhandler import *
from ringcomm.mpi4py.base.errors import *
from ringcomm.mpi4py.base.info import *
from ringcomm.mpi4py.base.pickling import *
from ringcomm.mpi4py.base.unsupported import *
from ringcomm.mpi4py.base.unsupported import _addressof, _commctx_inter, _handleof, _sizeof
from ringcomm.mpi4py.comm.cartcomm import *
from ringcomm.mpi4py.comm.comm import *
from ringcomm.mpi4py.comm.distgraphcomm import *
from ringcomm.mpi4py.comm.graphcomm import *
from ringcomm.mpi4py.comm.intracomm import *
from ringcomm.mpi4py.comm.topocomm import *
from ringcomm.mpi4py.datatypes.datatype import CODES as _typedict
from ringcomm.mpi4py.datatypes.datatype import Datatype
from ringcomm.mpi4py.datatypes.predefined import *
from ringcomm.mpi4py.datatypes.predefined import C_CODES as _typedict_c
from ringcomm.mpi4py.datatypes.predefined import F_CODES as _typedict_f
from ringcomm.mpi4py.datatypes.predefined import typecode as _typecode
from ringcomm.mpi4py.environment import *
from ringcomm.mpi4py.environment import _comm_lock, _comm_lock_table, _commctx_intra
from ringcomm.mpi4py.environment import start as _start
from ringcomm.mpi4py.groups.group import *
from ringcomm.mpi4py.groups.topology import Compute_dims
from ringcomm.mpi4py.ops.op import OP_NULL, Op
from ringcomm.mpi4py.ops.predefined import *
from ringcomm.mpi4py.requests.grequest import *
from ringcomm.mpi4py.requests.message import *
from ringcomm.mpi4py.requests.prequest import *
from ringcomm.mpi4py.requests.request import *
from ringcomm.mpi4py.requests.status import *

for _value in list(globals().values()):  # pickle, and the repr of classes, name this module
    if getattr(_value, "__module__", "").startswith("ringcomm.mpi4py.") and hasattr(_value, "__name__"):
        _value.__module__ = __name__

_start()
