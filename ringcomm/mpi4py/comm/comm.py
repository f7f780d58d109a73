"""Communicators: what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self, cast

import numpy as np

from ringcomm.bootstrap.place import host_id
from ringcomm.mpi4py.base import constants, errors
from ringcomm.mpi4py.base.attributes import Attributes
from ringcomm.mpi4py.base.errhandler import Errhandler
from ringcomm.mpi4py.base.errors import ERR_ARG, ERR_COMM, ERR_ERRHANDLER, failure, handled
from ringcomm.mpi4py.base.handles import Handle, constant
from ringcomm.mpi4py.base.info import INFO_NULL, Info
from ringcomm.mpi4py.base.unsupported import UnsupportedMethod
from ringcomm.mpi4py.calls.collectives import Collectives
from ringcomm.mpi4py.calls.objects import Objects
from ringcomm.mpi4py.calls.p2p import LARGEST_TAG
from ringcomm.mpi4py.calls.p2p_objects import ObjectsPointToPoint
from ringcomm.mpi4py.calls.probes import Probes
from ringcomm.mpi4py.groups.context import KINDS, NULL, Context, null_handle
from ringcomm.mpi4py.groups.group import Group
from ringcomm.mpi4py.groups.topology import Cart, DistGraph, Graph, Topology
from ringcomm.mpi4py.requests.buffered import Buffered
from ringcomm.mpi4py.requests.operations import DONE, PendingOperation
from ringcomm.mpi4py.requests.request import Request

__all__ = ["COMM_NULL", "Comm", "Intercomm"]

PREDEFINED = {  # attributes of all communicators
    constants.TAG_UB: LARGEST_TAG,
    constants.IO: constants.ANY_SOURCE,
    constants.WTIME_IS_GLOBAL: False,
    constants.APPNUM: 0,
}


class Comm(Attributes, ObjectsPointToPoint, Probes, Buffered, Collectives, Objects, Handle):
    """A communicator."""

    _object: Context = cast(Context, NULL)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Make a communicator from the number of an existing one."""
        comm = super().fromhandle(handle)
        return comm._object.handle() if comm else comm

    # --- Properties ---------------------------------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._object.size

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        return self._object.rank

    def Get_group(self) -> Group:
        """Return the group of the ranks."""
        return Group(self._object.ranks, self._world_rank)

    def Get_name(self) -> str:
        """Return the name."""
        return self._object.name if self else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._object.name = name

    def Get_info(self) -> Info:
        """Return a copy of the hints."""
        return Info.Create(self._object.info)

    def Set_info(self, info: Info) -> None:
        """Set hints, which have no effect."""
        self._object.info = dict(info.items()) if info else {}

    def Is_inter(self) -> bool:
        """Return False: there are no intercommunicators."""
        return self.Get_size() < 0  # a null handle raises

    def Is_intra(self) -> bool:
        """Return True."""
        return not self.Is_inter()

    def Get_topology(self) -> int:
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        kinds = {Cart: constants.CART, Graph: constants.GRAPH, DistGraph: constants.DIST_GRAPH}
        return kinds.get(type(self._object.topology), constants.UNDEFINED)

    def Compare(self, comm: Comm) -> int:
        """Return IDENT, CONGRUENT (the same ranks in the same order), SIMILAR (the same ranks) or UNEQUAL."""
        mine, other = self._object.ranks, comm._object.ranks
        if self._object is comm._object:
            return constants.IDENT
        if mine == other:
            return constants.CONGRUENT
        return constants.SIMILAR if {*mine} == {*other} else constants.UNEQUAL

    size, rank, group = property(Get_size), property(Get_rank), property(Get_group)
    is_inter, is_intra, topology = property(Is_inter), property(Is_intra), property(Get_topology)
    name, info = property(Get_name, Set_name), property(Get_info, Set_info)

    @property
    def is_topo(self) -> bool:
        """Whether there is a topology."""
        return self.Get_topology() != constants.UNDEFINED

    # --- Attributes ---------------------------------------------------------------------------------------------------

    @property
    def _attributes(self) -> dict[int, Any]:  # type: ignore[override]  # those of the context, read only here
        return self._object.attributes

    @handled
    def Get_attr(self, keyval: int) -> Any:
        """Return the value of an attribute, None if there is none."""
        if keyval == constants.UNIVERSE_SIZE:
            return self._object.universe
        if keyval == constants.LASTUSEDCODE:
            return errors.last_used_code()
        if keyval in PREDEFINED:
            return PREDEFINED[keyval] if self._object.size else None  # a null handle raises
        return super().Get_attr(keyval)

    Set_attr, Delete_attr = handled(Attributes.Set_attr), handled(Attributes.Delete_attr)

    # --- New communicators --------------------------------------------------------------------------------------------

    @handled
    def Dup(self, info: Info | None = None) -> Self:
        """Duplicate the communicator, with its topology and the attributes that their keys copy."""
        duplicate = type(self)._of(self._split(0, self._object.rank, self._object.topology))
        duplicate._object.info = dict(info.items()) if info else dict(self._object.info)
        self._copy_attributes(duplicate)
        return duplicate

    def Idup(self, info: Info | None = None) -> tuple[Self, Request]:
        """Duplicate the communicator; the request is complete."""
        return self.Dup(info), Request._of(PendingOperation(self._object, DONE))

    def Clone(self) -> Self:
        """Duplicate the communicator."""
        return self.Dup()

    Dup_with_info, Idup_with_info = Dup, Idup

    @handled
    def Create(self, group: Group) -> Any:
        """Make a communicator of the ranks of a group. All ranks of this one call it; groups may not overlap."""
        ranks = group.ranks
        color, key = (ranks[0], ranks.index(self._world_rank)) if self._world_rank in ranks else (None, 0)
        return self._made(self._split(color, key))

    @handled
    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Make a communicator of the ranks with the same color, ordered by key, then rank; COMM_NULL for UNDEFINED."""
        if color < 0 and color != constants.UNDEFINED:
            raise failure(ERR_ARG, f"color: expected a number >= 0, or UNDEFINED, got {color}")
        return self._made(self._split(None if color == constants.UNDEFINED else color, key))

    @handled
    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Any:
        """Make a communicator of the ranks that share memory (COMM_TYPE_SHARED), ordered by key, then rank."""
        guided = split_type in (constants.COMM_TYPE_HW_GUIDED, constants.COMM_TYPE_RESOURCE_GUIDED)
        resource = info.Get("mpi_hw_resource_type") if guided and info else None
        shared = split_type == constants.COMM_TYPE_SHARED or resource == "mpi_shared_memory"
        hosts = self.allgather(host_id())
        return self._made(self._split(hosts.index(host_id()) if shared else None, key))

    @handled
    def Free(self) -> None:
        """Free the communicator. Collective. The handle becomes null."""
        context = self._object
        if context.predefined:
            raise failure(ERR_COMM, f"expected a communicator that the program has made, got {context.name}")
        self._delete_attributes()
        context.free()
        self._nullify()

    @property
    def _is_predefined(self) -> bool:
        return not self or self._object.predefined

    Disconnect = Free

    @property
    def _world_rank(self) -> int:
        return self._object.ranks[self._object.rank]

    def _split(self, color: int | None, key: int, topology: Topology | None = None) -> Context | None:
        """Make a communicator of the ranks with the same color; None without a color. Callers are `handled`."""
        context = self._object
        comm = context.comm.split(color, key)
        if comm is None:
            return None
        made = Context(comm, comm.all_gather(np.array(self._world_rank)).tolist(), context)
        made.topology = topology
        return made

    def _made(self, context: Context | None) -> Any:
        """Return a handle of the class for the topology of a context."""
        return KINDS[type(None)]() if context is None else context.handle()

    # --- Errors -------------------------------------------------------------------------------------------------------

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[[Comm, int], None]) -> Errhandler:
        """Create an error handler that calls `errhandler_fn(comm, code)`."""
        return Errhandler._create(errhandler_fn)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        return Errhandler(self._object.errhandler)

    @handled
    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler."""
        if not errhandler:
            raise failure(ERR_ERRHANDLER, "expected an error handler, got ERRHANDLER_NULL")
        self._object.errhandler = Errhandler(errhandler)

    def Call_errhandler(self, errorcode: int) -> None:
        """Do what the error handler does at an error."""
        self._object.handle_error(errors.Exception(errorcode))

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End this process with the code, and all others of the job with an error."""
        self._object.abort(errorcode, f"MPI_Abort({errorcode})")

    @classmethod
    def Get_parent(cls) -> Intercomm:
        """Return a null handle: no process has spawned this one."""
        return Intercomm()

    Join = UnsupportedMethod("start all ranks with one launcher")
    Revoke = UnsupportedMethod("a lost process breaks a communicator by itself")
    Is_revoked = UnsupportedMethod("calls on a broken communicator raise the first error")
    Get_failed = Ack_failed = UnsupportedMethod("the error of a call names the lost process")
    Agree = Iagree = UnsupportedMethod("use Allreduce with BAND")
    Shrink = Ishrink = UnsupportedMethod("restart the job without the lost process")
    Psend_init = UnsupportedMethod("send each part by Isend")
    Precv_init = UnsupportedMethod("receive each part by Irecv")


class Intercomm(Comm):
    """The class of intercommunicators, of which there are none but null handles."""

    @classmethod
    def _check_kind(cls, named: Any) -> None:  # noqa: ARG003 (no handle is one)
        raise TypeError("expected an intercommunicator")

    Create_from_groups = UnsupportedMethod("use Intracomm.Create_from_group")

    def Get_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        """Raise the error of a null handle."""
        raise null_handle()

    Get_remote_size = Merge = Get_remote_group
    remote_group = remote_size = property(Get_remote_group)


COMM_NULL: Comm = constant("COMM_NULL", Comm())
