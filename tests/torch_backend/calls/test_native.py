"""The extension in C++ (native.py): what reaches the group from C++, and what Python sees of it."""

import gc
import io
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import test_groups
import test_profiler
import torch
import torch.distributed as dist
from test_behaviors import hooked, sharded_training
from test_clients import assert_as_on_gloo
from torch import nn

import harness
from harness import torch_world
from harness.failures import raised, until_waiting
from ringcomm import Aborted, ArgumentError, CollectiveTimeout, MismatchError, PeerLost
from ringcomm.torch.__main__ import main
from ringcomm.torch.compat import capabilities, native
from ringcomm.torch.process_group import RingcommProcessGroup
from ringcomm.torch.shared import communicator_of, shared_empty

pytestmark = [
    pytest.mark.skipif(native.PYTHON_BACKENDS, reason="from torch 2.14 on there is no extension"),
    pytest.mark.timeout(300),  # the first test compiles
]
CPU = torch.device("cpu")
TWO = "cpu:ringcomm,cuda:gloo"
COMPILING = 60  # seconds


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Return a cache folder that has the extension."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("cache")
    env = os.environ | {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run([sys.executable, "-m", "ringcomm.torch"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(cache):
    """Return a function that runs another one on ranks that have the extension, as torch_world.run does."""

    def run(fn, *args, backend="ringcomm", size=2, timeout=harness.OPERATION):
        settings = (("XDG_CACHE_HOME", str(cache)),)
        return harness.run(torch_world.within, size, backend, timeout, fn, args, settings=settings)

    return run


def backend_in_cpp(group=None):
    """Return what callers in C++ get of a group."""
    return dist.ProcessGroup._get_backend(group or dist.group.WORLD, CPU)


# --- Callers in C++ ---------------------------------------------------------------------------------------------------


def test_a_compiled_sharded_model_gathers_its_weights_in_one_bucket(run):
    assert_as_on_gloo(run(sharded_training, timeout=COMPILING), sharded_training)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_ddp_with_the_builtin_hook(run, kind):
    assert_as_on_gloo(run(hooked, kind), hooked, kind)


def events():
    """Return the events of calls from C++, with the shapes of their inputs."""
    x, out = torch.ones(3), torch.empty(6)
    name = dist.group.WORLD.group_name
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        backend_in_cpp().allreduce([x]).wait()
        torch.ops._c10d_functional.all_gather_into_tensor_out(x, 2, name, out=out)
        torch.ops._c10d_functional.wait_tensor(out)
    assert out.tolist() == [2.0] * 6
    return [(event.name, event.input_shapes) for event in profile.function_events if event.name.startswith("ringcomm:")]


def test_the_profiler_shows_a_call_from_cpp_once(run):
    assert run(events) == [[("ringcomm:all_reduce", [[3]]), ("ringcomm:all_gather", [[3]])]] * 2


# --- Errors -----------------------------------------------------------------------------------------------------------


def late(_):
    dist.barrier()


def absent(group):
    dist.destroy_process_group(group)


def aborting(group):
    group.abort()


def different(group):
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(4), group=group)


def errors(kind, other):
    """Make a call that fails because of rank 1, and return the text of its error, which all of a handle raises."""
    group = dist.new_group(timeout=timedelta(seconds=0.5 if other is late else harness.OPERATION))
    if dist.get_rank() == 1:
        dist.barrier()
        return other(group)
    work = backend_in_cpp(group).allreduce([torch.ones(3)])
    future = work.get_future()
    dist.barrier()
    seen = [raised(kind, call) for call in (future.wait, future.wait, future.value, work.wait, work.wait, work.result)]
    seen.append(work.exception())
    assert {type(error) for error in seen} == {kind}
    assert work.is_completed()
    assert not work.is_success()
    if other is late:
        dist.barrier()
    return {str(error) for error in seen}


@pytest.mark.parametrize("backend", ["ringcomm", TWO])
@pytest.mark.parametrize(
    ("kind", "other"),
    [(CollectiveTimeout, late), (PeerLost, absent), (Aborted, aborting), (MismatchError, different)],
    ids=lambda value: value.__name__,
)
def test_errors_keep_their_type_through_cpp(run, kind, other, backend):
    (text,) = run(errors, kind, other, backend=backend)[0]
    assert "in the torch.distributed group" in text


def failing_backward(kind):
    group = dist.new_group()
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    loss = net(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        until_waiting(group.comm, 0)
        return group.abort()
    return str(raised(Aborted, loss.backward))


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_an_error_inside_a_hook_of_ddp_keeps_its_type(run, kind):
    assert "global rank 1 ended the torch.distributed group" in run(failing_backward, kind)[0]


# --- Threads, and ends ------------------------------------------------------------------------------------------------


def waiting_beside_a_thread():
    """Rank 1 makes its call when it hears from a thread of rank 0, which runs while rank 0 waits in C++."""
    group, x, out = dist.new_group(), torch.ones(3), torch.empty(6)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
        group.all_gather_single(out, x).wait()
        return out.tolist()
    torch.ops._c10d_functional.all_gather_into_tensor_out(x, 2, group.group_name, out=out)

    def speak():
        time.sleep(0.1)  # in which the other thread begins to wait
        dist.send(torch.ones(1), 1)

    thread = threading.Thread(target=speak)
    thread.start()
    torch.ops._c10d_functional.wait_tensor(out)
    thread.join()
    return out.tolist()


def test_other_threads_run_while_cpp_waits(run):
    assert run(waiting_beside_a_thread) == [[1.0] * 6] * 2


def forgotten():
    group = dist.new_group()
    reference = weakref.ref(group)
    backend = backend_in_cpp(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert reference() is None
    with pytest.raises(ReferenceError):
        backend.barrier()


def test_a_destroyed_group_is_freed_with_its_backend(run):
    run(forgotten)


ENDING = """
import threading, time, torch, torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.FileStore({store!r}, 1), rank=0, world_size=1)
backend = dist.ProcessGroup._get_backend(dist.group.WORLD, torch.device("cpu"))
x, out = torch.ones(3), torch.empty(3)
torch.ops._c10d_functional.all_gather_into_tensor_out(x, 1, dist.group.WORLD.group_name, out=out)
def compute():
    while True:
        pass
for tag in range(4):
    threading.Thread(target=lambda tag: backend.recv([x.clone()], 0, tag).wait(), args=[tag], daemon=True).start()
threading.Thread(target=compute, daemon=True).start()  # the woken threads wait for the GIL
time.sleep(0.2)  # in which the threads begin to wait
print("end")
"""


@pytest.mark.parametrize("backend", ["ringcomm", TWO])
def test_a_process_may_end_while_threads_wait(cache, backend, tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    for attempt in range(3):  # where threads return, two of three end with SIGABRT
        command = [sys.executable, "-c", ENDING.format(backend=backend, store=str(tmp_path / f"store{attempt}"))]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# --- Two backends -----------------------------------------------------------------------------------------------------


def served():
    group = dist.group.WORLD
    tensor = shared_empty(1 << 16)
    tensor.fill_(1)
    dist.all_reduce(tensor)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9))
    ours, theirs = (group._get_backend(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert type(theirs) is dist.ProcessGroupGloo
    assert ours.comm is communicator_of()
    assert ours.options._timeout == theirs.options._timeout == timedelta(seconds=9)
    other = dist.new_group()
    dist.barrier()  # a rank that leaves while others still connect their gloo would fail them
    return ours.name(), theirs.name(), tensor[0].item(), communicator_of(other).size


def test_each_device_has_its_own_backend(run):
    assert run(served, backend=TWO) == [("ringcomm", "gloo", 2.0, 2)] * 2


def debugged():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return type(group._get_backend(CPU)).__name__, x.tolist()


def test_debugging_in_detail_wraps_the_backend(run):
    assert run(debugged, backend=TWO) == [("_ProcessGroupWrapper", [2.0] * 3)] * 2


def test_operations_beside_another_backend(run):
    run(test_groups.every_operation, backend=TWO)


def test_the_profiler_shows_each_call_beside_another_backend(run):
    ours = run(test_profiler.events, "ringcomm", backend=TWO)
    gloo = torch_world.run(test_profiler.events, 2, "gloo", backend="gloo")
    for mine, theirs in zip(ours, gloo, strict=True):
        assert mine == {call: test_profiler.SCATTERS.get(call[0], shown) for call, shown in theirs.items()}


def test_comm_debug_mode_counts_the_calls_beside_another_backend(run):
    assert run(test_profiler.counts, backend=TWO) == torch_world.run(test_profiler.counts, 2, backend="gloo")


@pytest.mark.parametrize("backend", ["cpu:ringcomm,cuda:nccl", "cpu:gloo,cuda:ringcomm"])
def test_another_backend_is_refused_rather_than_replaced_without_the_extension(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(capabilities, "extension", lambda: None)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(ArgumentError, match=f"(?s)backend '{backend}'.*build it once by {native.BUILD}"):
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


# --- Building ---------------------------------------------------------------------------------------------------------


def direct():
    group = dist.group.WORLD
    assert type(group) is RingcommProcessGroup
    assert group._get_backend(CPU) is group


def test_callers_in_python_do_not_pass_through_cpp(run):
    run(direct)


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo a part > "$2"
sleep 0.5
echo "$0" > "$2"
"""


@pytest.fixture
def compiler(tmp_path):
    """Return a compiler that is quick, and a name for which there is none."""
    path = tmp_path / "compiler"
    path.write_text(COMPILER)
    path.chmod(0o700)
    return path


def command(_, cache, compiler):
    """Run the command in a process that has imported torch; return its status and what it writes."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        settings = {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler)}
        with patch.dict(os.environ, settings), patch.object(sys, "argv", ["ringcomm.torch"]):
            try:
                main()
                status = 0
            except SystemExit as error:  # of a text, the interpreter makes 1
                status = 1 if isinstance(error.code, str) else error.code
                print(error, file=sys.stderr)
    return status, out.getvalue(), err.getvalue()


def test_the_command_builds_once_and_says_where(compiler, tmp_path):
    [(status, out, err)] = harness.run(command, 1, tmp_path, compiler)
    assert status == 0, err
    library, _, seconds = out.rpartition(": ")
    assert Path(library).read_text() == f"{compiler}\n"
    assert float(seconds.removesuffix(" s\n")) >= 0.5
    folder = Path(library).parent
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert [*folder.iterdir()] == [Path(library)]
    compiler.unlink()
    assert harness.run(command, 1, tmp_path, compiler)[0][1].startswith(library)


def test_several_processes_may_build_at_once(compiler, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(harness.run, command, 3, tmp_path, compiler)
        while not building.done():
            assert {path.read_text() for path in tmp_path.glob("ringcomm/torch/*.so")} <= {f"{compiler}\n"}
            time.sleep(0.01)
    statuses, outs, _ = zip(*building.result(), strict=True)
    assert {*statuses} == {0}
    (library,) = {out.rpartition(": ")[0] for out in outs}
    assert [*Path(library).parent.iterdir()] == [Path(library)]


def test_a_compiler_that_is_missing_or_fails_is_named(compiler, tmp_path):
    compiler.write_text("#!/bin/sh\necho 'no room left' >&2\nexit 3\n")
    [(status, out, err)] = harness.run(command, 1, tmp_path, compiler)
    assert (status, out) == (1, "")
    assert f"{compiler} failed, status 3:\nno room left" in err
    assert not [*tmp_path.glob("ringcomm/torch/*")]
    compiler.unlink()
    [(status, out, err)] = harness.run(command, 1, tmp_path, compiler)
    assert (status, out) == (1, "")
    assert f"there is no C++ compiler {compiler}: install g++" in err
    assert "Traceback" not in err
