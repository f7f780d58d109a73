"""mpi4py without MPI: programs that say `from mpi4py import MPI` run on ringcomm.

`from ringcomm.mpi4py import MPI` is the same in the source; `ringcomm run --mpi4py` needs no edit. docs/mpi4py.md lists
what there is. Each class of MPI has the file of its name in base/, comm/, datatypes/, groups/, ops/ or requests/; its
methods in calls/ and base/attributes.py are inherited. In other files are

    base/constants.py: BottomType, BufferAutomaticType, InPlaceType
    base/errors.py: Exception
    base/pickling.py: Pickle
    base/unsupported.py: File, Session, Win
    comm/comm.py: Intercomm
"""

import sys
from pathlib import Path
from typing import NoReturn

from ringcomm.errors import unknown
from ringcomm.version import VERSION

__all__ = ["MPI", "get_config", "get_include", "profile", "rc"]

IMITATED = "4.1.2"
__version__ = f"{IMITATED}+ringcomm{VERSION}"


class Rc:
    """The options of mpi4py, read when MPI is imported: MPI4PY_RC_<NAME> in the environment has precedence.

    Attributes:
        initialize: Connect the ranks when MPI is imported, not in MPI.Init. Default: True.
        threads: Without it, Query_thread reports THREAD_SINGLE. Default: True.
        thread_level: What Query_thread reports: "multiple", "serialized", "funneled" or "single". Calls from several
            threads work in any case. Default: "multiple".
        finalize: Disconnect at exit. None, the default: if MPI was initialized by its import.
        errors: "exception" (ERRORS_RETURN), "default", "fatal" or "abort" (ERRORS_ARE_FATAL). Default: "exception".
        fast_reduce: Has no effect: objects are always reduced in rank order. Default: True.
        recv_mprobe: Has no effect: messages are always matched as mprobe does. Default: True.
        irecv_bufsz: The longest pickled object that irecv takes, in bytes, unless it is given memory. Default: 32768.
    """

    initialize: bool = True
    threads: bool = True
    thread_level: str = "multiple"
    finalize: bool | None = None
    errors: str = "exception"
    fast_reduce: bool = True
    recv_mprobe: bool = True
    irecv_bufsz: int = 32768

    def __init__(self, **options: object) -> None:
        self(**options)

    def __setattr__(self, name: str, value: object) -> None:
        _check(name)
        super().__setattr__(name, value)

    def __call__(self, **options: object) -> None:
        """Set options; if one is unknown, none."""
        for name in options:
            _check(name)
        for name, value in options.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<{__name__}.rc>"


DEFAULTS = {name: getattr(Rc, name) for name in Rc.__annotations__}


def _check(name: str) -> None:
    if name not in DEFAULTS:
        raise TypeError(str(unknown("option of mpi4py.rc", name, DEFAULTS)))


rc = Rc()
sys.modules[f"{__name__}.rc"] = rc  # type: ignore[assignment]  # mpi4py has it as a module, too


def _installed() -> list[str]:
    """Return the folder of an installed mpi4py 4."""
    folders = [Path(folder, "mpi4py") for folder in sys.path]
    return [str(folder) for folder in folders if (folder / "util" / "sync.py").is_file()][:1]


__path__ += _installed()  # its modules util, bench and typing are written in Python, and use the MPI of this package


def get_config() -> dict[str, str]:
    """Return how mpi4py was built: an empty dictionary, since there is no MPI."""
    return {}


def get_include() -> NoReturn:
    """Raise NotImplementedError: ringcomm has no C headers of mpi4py."""
    text = "mpi4py.get_include: ringcomm has no MPI handles that C code could use; compile against mpi4py and an MPI"
    raise NotImplementedError(text)


def profile(name: str, *, path: object = None) -> NoReturn:
    """Raise NotImplementedError: ringcomm calls no MPI that a library could profile."""
    raise NotImplementedError(f"mpi4py.profile({name!r}): ringcomm calls no MPI; use a profiler of Python, or py-spy")
