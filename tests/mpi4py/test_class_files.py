"""Each class of MPI has the file of its name, or the docstring of ringcomm.mpi4py says where it is."""

import re
from pathlib import Path

from ringcomm import mpi4py
from ringcomm.mpi4py import MPI


def test_the_docstring_names_the_file_of_each_class_that_has_none_of_its_name():
    rows = dict(re.findall(r"^    (\S+\.py): (.+)$", mpi4py.__doc__, re.MULTILINE))
    listed = {name: file for file, names in rows.items() for name in names.split(", ")}
    classes = {each.__name__ for name, each in vars(MPI).items() if isinstance(each, type) and name[0] != "_"}
    files = {name: file_of(name) for name in classes}
    assert listed == {name: str(file) for name, file in files.items() if file.stem != name.lower()}


def file_of(name):
    root = Path(mpi4py.__file__).parent
    files = [path for path in root.glob("*/*.py") if re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE)]
    assert len(files) == 1, f"{name} is defined in {files}"
    return files[0].relative_to(root)
