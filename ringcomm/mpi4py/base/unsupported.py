"""What mpi4py has and ringcomm does not: each raises NotImplementedError and names what to use."""

from collections.abc import Callable
from typing import Any, NoReturn

from ringcomm.mpi4py.base.errors import ERR_FILE, ERR_SESSION, ERR_WIN
from ringcomm.mpi4py.base.handles import Handle, constant

__all__ = [
    "FILE_NULL",
    "SESSION_NULL",
    "WIN_NULL",
    "Close_port",
    "File",
    "Get_abi_fortran_info",
    "Get_abi_info",
    "Get_abi_version",
    "Lookup_name",
    "Open_port",
    "Publish_name",
    "Register_datarep",
    "Session",
    "Unpublish_name",
    "Win",
]


def unsupported(name: str, instead: str) -> Callable[..., Any]:
    """Return a function that raises NotImplementedError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported by ringcomm; {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {instead}."
    return refuse


class UnsupportedMethod:
    """A method of any kind that raises NotImplementedError."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, staticmethod(unsupported(f"{owner.__name__}.{name}", self._instead)))


class _Unsupported(type):
    """The type of classes of which only null handles exist: every method raises NotImplementedError."""

    _instead: str

    def __getattr__(cls, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return staticmethod(unsupported(f"{cls.__name__}.{name}", cls._instead))


class _Refusing(metaclass=_Unsupported):
    """Refuses the methods of null handles as those of the class."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(type(self), name)
        return method


class Win(_Refusing, Handle):
    """Windows of one-sided communication, which there are not."""

    _null = ERR_WIN, "a window", "WIN_NULL"
    _instead = "use messages, or ringcomm.Communicator.empty, memory that all ranks of a machine share"


class File(_Refusing, Handle):
    """Files of parallel input and output, which there are not."""

    _null = ERR_FILE, "a file", "FILE_NULL"
    _instead = "use numpy.memmap, of which each rank writes its part"


class Session(_Refusing, Handle):
    """Sessions, which there are not."""

    _null = ERR_SESSION, "a session", "SESSION_NULL"
    _instead = "use COMM_WORLD"


WIN_NULL: Win = constant("WIN_NULL", Win())
FILE_NULL: File = constant("FILE_NULL", File())
SESSION_NULL: Session = constant("SESSION_NULL", Session())

ONE_LAUNCHER = "start all ranks with one launcher"
Open_port, Close_port, Publish_name, Unpublish_name, Lookup_name = (
    unsupported(name, ONE_LAUNCHER)
    for name in ("Open_port", "Close_port", "Publish_name", "Unpublish_name", "Lookup_name")
)
Register_datarep = unsupported("Register_datarep", "convert the data in Python")
Get_abi_version, Get_abi_info, Get_abi_fortran_info = (
    unsupported(name, "there is no MPI, hence no binary interface")
    for name in ("Get_abi_version", "Get_abi_info", "Get_abi_fortran_info")
)
_commctx_inter = unsupported("_commctx_inter", "there are no intercommunicators")
_sizeof, _addressof, _handleof = (
    unsupported(name, "there are no C handles; compile against mpi4py and an MPI")
    for name in ("_sizeof", "_addressof", "_handleof")
)
