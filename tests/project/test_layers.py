"""Imports only go down. The layers of docs/architecture.md are this table; a new module finds its place here first."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringcomm"

# From the top. A name stands for a module or a whole package; modules of one layer may import each other, acyclically.
LAYERS = (
    ("__main__", "commands"),
    ("bench", "mpi4py", "parallel", "parameter_server", "plan", "pretrained", "ray", "torch"),
    ("__init__", "communicator", "elastic", "launcher", "objects", "pending", "start", "testing", "trace"),
    ("transports",),
    ("algorithms", "layout_rules", "pipelining"),
    ("arrays", "bootstrap", "callbacks", "devices", "shapes", "work"),
    ("native",),
    ("config", "options", "types"),
    ("machine",),
    ("errors", "version"),
)
# These use the library as any user does. Beside its public API, the first may parse options, ask about the machine, its
# settings, its devices and its place in a job, write files and launch a kernel by itself; the second counts cores,
# reads arrays, matches messages as MPI does, and connects groups that not all ranks of a communicator enter; the third
# carries out schedules; the planner prices algorithms and schedules; the last brings a store and a transport of its
# own.
OUTSIDERS = {
    "bench": (
        *("bootstrap.place", "config", "devices", "machine", "native", "options"),
        *("transports.cuda.virtual", "types"),
    ),
    "mpi4py": (
        *("arrays.protocols", "bootstrap", "communicator", "config", "devices", "errors", "machine.topology"),
        *("objects", "start", "transports.messages", "transports.requests", "types", "version"),
    ),
    "parallel": ("errors", "layout_rules", "parameter_server", "pipelining", "torch"),
    "parameter_server": ("errors", "torch.timeouts"),
    "plan": ("algorithms", "config", "errors", "layout_rules", "machine", "options", "pipelining"),
    "pretrained": ("errors", "parallel"),
    "ray": ("bootstrap.rendezvous", "config", "errors", "start"),
    "torch": (
        *("arrays", "bootstrap", "callbacks", "communicator", "config", "devices", "errors", "native"),
        *("start", "transports", "types"),
    ),
}
# Names that only some modules may import or use.
RESERVED = {
    "os.environ": (
        *("config", "bootstrap.place", "launcher.preload", "testing.ranks"),
        *("bench.machine", "bench.peers", "bench.tuning.command"),
        *("bench.rank.__main__", "bench.rank.gloo", "bench.rank.nccl"),
        *("torch.compat.native", "mpi4py.environment", "mpi4py.base.options", "mpi4py.futures.preparation"),
    ),
    "torch": (
        "bench.rank.gloo",
        "bootstrap.torch_start",
        "parallel",
        "parameter_server",
        "plan.measure",
        "pretrained",
        "torch",
    ),
    "cupy": ("devices", "commands.doctor", "bench.rank.cuda", "bench.rank.nccl", "bench.kernels.device_arrays"),
    # SECURITY.md, *What is unpickled*.
    "pickle": (
        *("objects", "launcher.pickling", "launcher.forkserver", "launcher.preload", "mpi4py.base.pickling"),
        *("testing.ranks", "testing.marked"),
        *("parallel.state.checkpoint", "parallel.state.encoding"),
    ),
    "mpi4py": ("bench.rank.mpi", "transports.mpi.world", "transports.mpi.link", "transports.mpi.finalize"),
}
# The methods of mpi4py's communicators that pickle; their capitalized forms take buffers.
PICKLING = {
    *("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv"),
    *("probe", "iprobe", "mprobe", "improbe"),
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"),
    *("neighbor_allgather", "neighbor_alltoall"),
}
# Runs where the rest of ringcomm is not installed, under another name.
MOVABLE = "bench.rank"

# The folders of native sources, from the top. Folders of one layer do not include each other.
NATIVE_LAYERS = (
    ("bindings/python",),
    ("bindings/src/abi",),
    ("bindings/emulated_cuda",),
    ("bindings/src/network",),
    ("bindings/src/collectives",),
    ("bindings/src/shm",),
    ("bindings/src/machine",),
    ("bindings/src/memory",),
    ("bindings/src/p2p",),
    ("bindings/src/cuda",),
    ("bindings/src/link",),
    ("bindings/src/core",),
    ("kernels/cpu", "kernels/cuda"),
    ("kernels",),
    ("bindings/include",),
    ("ringcomm",),
)
INCLUDE_PATH = (ROOT / "bindings/include", ROOT / "bindings/src", ROOT)

LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def test_every_module_has_a_layer():
    assert {top(module) for module in MODULES} <= {*LEVEL}


def test_imports_only_go_down():
    for module in MODULES:
        for other in imports(module):
            assert LEVEL[top(module)] <= LEVEL[top(other)], f"{module} imports {other}"


def test_outsiders_import_the_public_api_only():
    for module in MODULES:
        if top(module) in OUTSIDERS:
            for other in imports(module):
                allowed = {"__init__", top(module), *OUTSIDERS[top(module)]}
                assert {top(other), other} & allowed, f"{module} imports {other}"


def test_frameworks_and_the_environment_stay_in_their_files():
    for module in MODULES:
        tree = tree_of(module)
        used = {name.split(".")[0] for name, _ in import_statements(tree)}
        used |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name, owners in RESERVED.items():
            assert name not in used or {module, top(module)} & {*owners}, f"{module} uses {name}"


def test_no_method_of_mpi4py_pickles():
    """While a group is made, nothing that another process sends is unpickled."""
    for module in MODULES:
        if module.startswith("transports.mpi.") or module in RESERVED["mpi4py"]:
            used = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
            assert not PICKLING & used, module


def test_movable_modules_import_only_each_other():
    for module in MODULES:
        if module.startswith(MOVABLE):
            for other in imports(module):
                assert other.startswith(MOVABLE) or module == f"{MOVABLE}.ringcomm", f"{module} imports {other}"


def test_no_module_tests_for_the_class_of_a_transport_outside_its_files():
    """What differs between transports is a member of the contract."""
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                for name in re.findall(r"\w*Transport\b", ast.unparse(node.args[1])):
                    assert {module, module.rpartition(".")[0]} & files_of(name), f"{module} tests for {name}"


def test_no_class_name_is_defined_twice():
    """One word, one meaning: docs/architecture.md, *Words*."""
    classes = [(n.name, module) for module in MODULES for n in ast.walk(tree_of(module)) if isinstance(n, ast.ClassDef)]
    names = Counter(name for name, _ in classes)
    assert [found for found in classes if names[found[0]] > 1] == []


def test_no_native_type_is_defined_twice():
    """In whatever namespace; emulated.cuh is another form of device.cuh."""
    sources = [source for source in native_sources() if source.name != "emulated.cuh"]
    pattern = r"^(?:struct|class|enum|enum class) (?:alignas\(\w+\) )?(\w+)(?: final)?(?: : [^{]+)? \{"
    names = Counter(name for source in sources for name in re.findall(pattern, source.read_text(), re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_have_no_cycles():
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()


@pytest.mark.parametrize("package", ["mpi4py", "parallel", "plan", "torch"])
def test_folders_of_a_package_have_an_order(package):
    """So that they can be read one after another: none imports another that imports it."""
    graph = defaultdict(set)
    for module in MODULES:
        if module.startswith(f"{package}."):
            parts = {other.split(".")[1] for other in imports(module) if other.startswith(f"{package}.")}
            graph[module.split(".")[1]] |= parts - {module.split(".")[1], "__init__"}
    del graph["__init__"]  # which imports what the package offers
    TopologicalSorter(graph).prepare()


def files_of(name):
    """Return the module that defines a class, and its folder if that is a folder of a transport."""
    (module,) = (module for module, path in MODULES.items() if re.search(rf"^class {name}\b", path.read_text(), re.M))
    return {module, module.rpartition(".")[0]} - {"transports"}


def test_native_includes_only_go_down():
    level = {ROOT / folder: level for level, layer in enumerate(NATIVE_LAYERS) for folder in layer}
    graph = {source: native_includes(source) for source in native_sources()}
    for source, included in graph.items():
        for other in included:
            down = source.parent == other.parent or level[source.parent] < level[other.parent]
            assert down, f"{source.relative_to(ROOT)} includes {other.relative_to(ROOT)}"
    TopologicalSorter(graph).prepare()


def native_sources():
    paths = [path for folder in ("bindings", "kernels") for path in (ROOT / folder).rglob("*.*")]
    return [path for path in paths if path.suffix in {".cpp", ".cu", ".cuh", ".h", ".inc"}]


def native_includes(source):
    folders = (source.parent, *INCLUDE_PATH)
    names = re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)
    return {next(folder / name for folder in folders if (folder / name).exists()) for name in names}


def top(module):
    return module.split(".")[0]


def tree_of(module):
    return ast.parse(MODULES[module].read_text())


@cache  # and not the trees, which the garbage collector would visit in all later tests
def imports(module):
    """Return the modules of ringcomm that `module` imports, anywhere in its text."""
    found = set()
    for name, names in import_statements(tree_of(module), f"ringcomm.{module}"):
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
    """Return the module that `name` (without ringcomm) is, or None if it is a name inside one."""
    return next((module for module in (name, f"{name}.__init__") if module in MODULES), None)
