"""The docstring of ringcomm.mpi4py says in which file each class of MPI is."""

import re
from pathlib import Path

from ringcomm import mpi4py
from ringcomm.mpi4py import MPI


def test_the_docstring_names_the_file_of_each_class():
    rows = dict(re.findall(r"^    (\S+\.py): (.+)$", mpi4py.__doc__, re.MULTILINE))
    listed = {(name, file) for file, names in rows.items() for name in names.split(", ")}
    classes = {each.__name__ for name, each in vars(MPI).items() if isinstance(each, type) and name[0] != "_"}
    assert listed == {(name, file) for name in classes for file in files_of(name)}


def files_of(name):
    root = Path(mpi4py.__file__).parent
    files = [path for path in root.glob("*/*.py") if re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE)]
    assert len(files) == 1, f"{name} is defined in {files}"
    return [str(path.relative_to(root)) for path in files]
