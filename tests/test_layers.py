"""Imports only go down. The layers of docs/architecture.md are this table; a new module finds its place here first."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ringcomm"

# From the top. A name stands for a module or a whole package; modules of one layer may import each other, acyclically.
LAYERS = (
    ("__main__", "bench", "cli", "doctor", "output", "parallel", "run", "simulate", "torch", "ways"),
    ("__init__", "communicator", "forkserver", "launch", "objects", "start", "testing", "work"),
    ("transports",),
    ("algorithms",),
    (
        *("buffer", "cgroup", "completion", "memory", "place", "processes", "shapes", "sockets", "store"),
        *("devices", "storeserver", "topology"),
    ),
    ("native",),
    ("config", "files", "tuning", "types"),
    ("errors",),
)
# These use the library as any user does. Beside its public API, the first may ask about the machine, its settings and
# its devices, write files and launch a kernel by itself; the second draws as algorithms are drawn, and counts what the
# backend is asked for; the third brings a store and a transport of its own.
OUTSIDERS = {
    "bench": ("config", "devices", "files", "memory", "transports.cuda.virtual", "tuning", "types"),
    "parallel": ("algorithms", "errors", "torch"),
    "torch": ("communicator", "completion", "config", "errors", "place", "start", "store", "transports", "types"),
}
# What only some may import or touch.
RESERVED = {
    "os.environ": (
        *("config", "place", "bench.machine", "bench.peers"),
        *("bench.rank.__main__", "bench.rank.gloo", "bench.rank.nccl"),
    ),
    "torch": ("bench.rank.gloo", "parallel", "torch"),
    "cupy": ("devices", "doctor", "bench.rank.cuda", "bench.rank.nccl", "bench.virtual"),
    "mpi4py": ("bench.rank.mpi", "transports.mpi.start", "transports.mpi.lane", "transports.mpi.wire"),
}
# Runs where the rest of ringcomm is not installed, under another name.
MOVABLE = "bench.rank"

LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
modules = pytest.mark.parametrize("module", sorted(MODULES))


@modules
def test_every_module_has_a_layer(module):
    assert top(module) in LEVEL


@modules
def test_imports_only_go_down(module):
    for other in imports(module):
        assert LEVEL[top(module)] <= LEVEL[top(other)], f"{module} imports {other}"


@modules
def test_outsiders_import_the_public_api_only(module):
    if top(module) in OUTSIDERS:
        for other in imports(module):
            allowed = {"__init__", top(module), *OUTSIDERS[top(module)]}
            assert {top(other), other} & allowed, f"{module} imports {other}"


@modules
def test_frameworks_and_the_environment_stay_in_their_files(module):
    tree = ast.parse(MODULES[module].read_text())
    used = {name.split(".")[0] for name, _ in import_statements(tree)}
    used |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name, owners in RESERVED.items():
        assert name not in used or {module, top(module)} & {*owners}, f"{module} uses {name}"


@modules
def test_what_moves_takes_nothing_along(module):
    if module.startswith(MOVABLE):
        for other in imports(module):
            assert other.startswith(MOVABLE) or module == f"{MOVABLE}.ours", f"{module} imports {other}"


def test_no_import_leads_back_to_where_it_started():
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()


def top(module):
    return module.split(".")[0]


def imports(module):
    """Return the modules of ringcomm that `module` imports, anywhere in its text."""
    found = set()
    for name, names in import_statements(ast.parse(MODULES[module].read_text()), f"ringcomm.{module}"):
        package, _, inner = name.partition(".")
        if package != "ringcomm" or inner == "_native":
            continue
        submodules = {resolve(f"{inner}.{part}".strip(".")) for part in names}
        found |= submodules - {None} or {resolve(inner or "__init__")}
    return found - {module, None}


def import_statements(tree, module=""):
    """Yield (module, imported names) of every import statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert node.level == 1, "relative imports stay in their folder"
                assert module.startswith(f"ringcomm.{MOVABLE}") or not module, "imports are absolute"
            base = [module.rpartition(".")[0]] * node.level
            yield ".".join([*base, *[node.module] * bool(node.module)]), [alias.name for alias in node.names]


def resolve(name):
    """Return the module that `name` (without ringcomm) is, or None if it is a thing inside one."""
    return next((module for module in (name, f"{name}.__init__") if module in MODULES), None)
