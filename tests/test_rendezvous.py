"""Places told by launchers, and the stores at which ranks meet."""

import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ringcomm import ArgumentError, CollectiveTimeout, PeerLost, rendezvous
from ringcomm.rendezvous import HashStore, Place, SocketStore, find_place, open_store

OURS = {"RINGCOMM_RANK": "1", "RINGCOMM_SIZE": "4", "RINGCOMM_JOB": "j", "RINGCOMM_NONCE": "secret"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SAY_PLACE = (
    "from ringcomm.rendezvous import find_place as f; p = f(); print(p.rank, p.size, p.job, p.launcher, sep='|')"
)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (OURS, Place(1, 4, "ringcomm run/j", "secret", "ringcomm run")),
        (TORCHRUN, Place(1, 4, "torchrun/none/29500/2", "", "torchrun")),
        (OPEN_MPI, Place(1, 4, "Open MPI/prterun-host-17@1", "", "Open MPI")),
        (SRUN, Place(1, 4, "srun/7/0", "", "srun")),
    ],
    ids=lambda value: getattr(value, "launcher", ""),
)
def test_a_place_is_what_the_launcher_says(environ, place):
    assert find_place(environ) == place


def test_without_a_launcher_there_is_one_rank():
    place = find_place({"PATH": "/bin"})
    assert (place.rank, place.size, place.launcher) == (0, 1, "none")


def test_a_batch_script_of_slurm_is_alone():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}).size == 1


def test_the_innermost_launcher_counts():
    assert find_place({**SRUN, **TORCHRUN, "RANK": "2"}).rank == 2
    assert find_place({**SRUN, **TORCHRUN, **OURS, "RINGCOMM_RANK": "3"}).rank == 3


def test_a_place_survives_the_way_through_the_environment():
    place = Place(2, 3, "job", "nonce")
    found = find_place(place.environment())
    assert (found.rank, found.size, found.nonce) == (2, 3, "nonce")
    assert place.environment().keys() >= os.environ.keys()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**OURS, "RINGCOMM_RANK": "4"}, "RINGCOMM_RANK=4, RINGCOMM_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1, WORLD_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=many"),
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE and LOCAL_WORLD_SIZE is not"),
        ({"RINGCOMM_RANK": "1"}, "RINGCOMM_RANK is set but RINGCOMM_SIZE"),
    ],
)
def test_contradicting_variables_are_named(environ, names):
    with pytest.raises(ArgumentError) as raised:
        find_place(environ)
    assert names in str(raised.value)


@pytest.mark.parametrize(
    "environ",
    [
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {**MPICH, "MPI_LOCALNRANKS": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_ranks_on_several_hosts_are_told_both_cures(environ):
    with pytest.raises(ArgumentError, match=r"pip install 'ringcomm\[mpi\]'.*ringcomm\.torch"):
        find_place(environ)


def test_mpich_without_its_hydra_is_an_error():
    with pytest.raises(ArgumentError, match="hydra"):
        find_place(MPICH)


@pytest.mark.mpi
@pytest.mark.slow
def test_the_ranks_of_one_mpirun_have_one_job_and_those_of_the_next_another():
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent)
    if mpirun is None:
        pytest.skip("no mpirun beside this Python")
    environ = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    # A shell between the launcher and the rank is nothing special.
    command = [mpirun, "-n", "3", "sh", "-c", f'"{sys.executable}" -c "{SAY_PLACE}"; true']
    jobs = set()
    for _ in range(2):
        output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
        places = sorted(line.split("|") for line in output.splitlines())
        assert [place[:2] for place in places] == [["0", "3"], ["1", "3"], ["2", "3"]]
        assert len({place[2] for place in places}) == 1
        jobs.add(places[0][2])
    assert len(jobs) == 2


def test_threads_meet_at_a_hash_store():
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(store.get, "key", 10) for _ in range(3)]
        store.set("key", b"value")
        assert [each.result() for each in waiting] == [b"value"] * 3
    with pytest.raises(CollectiveTimeout, match=r"no rank has set 'other' within 0\.01 s"):
        store.get("other", 0.01)


@pytest.fixture
def job():
    return uuid.uuid4().hex


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def address(job):
    return f"\0ringcomm-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def join(job, rank, size, nonce="", timeout=20):
    return closing(SocketStore(Place(rank, size, job, nonce), timeout))


def connect(name):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(10)
    stranger.connect(name)
    return stranger


@pytest.mark.parametrize("size", [2, 5])
def test_what_one_rank_sets_all_ranks_get(job, size):
    def rank(number):
        with join(job, number, size) as store:
            store.set(f"from {number}", bytes([number]) + b"\0tail")
            return [store.get(f"from {other}", 20) for other in range(size)]

    with ThreadPoolExecutor(size) as pool:
        # Backwards, so that rank 0 is not there when the others come.
        found = list(pool.map(rank, reversed(range(size))))
    assert found == [[bytes([number]) + b"\0tail" for number in range(size)]] * size


def test_those_who_did_not_arrive_are_named(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 4)
        with join(job, 0, 4) as store, rank_1.result() as other:
            with pytest.raises(
                CollectiveTimeout, match=r"^ranks 2 and 3 of 4 did not arrive within 0\.05 s$"
            ) as raised:
                store.get("key", 0.05)
            assert raised.value.rank == 2
            with pytest.raises(CollectiveTimeout, match="ranks 2 and 3 of 4"):
                other.get("key", 0.05)


def test_a_key_that_nobody_sets_is_named(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 2)
        with join(job, 0, 2) as store, rank_1.result(), pytest.raises(CollectiveTimeout, match="no rank has set 'key'"):
            store.get("key", 0.05)


def test_a_missing_rank_0_is_named(job):
    with pytest.raises(CollectiveTimeout, match=r"^rank 0 of 2 did not arrive within 0\.05 s$"):
        join(job, 1, 2, timeout=0.05)


def test_the_second_to_claim_a_rank_is_refused_and_told(job, caplog):
    with join(job, 0, 3) as store, join(job, 1, 3):
        with pytest.raises(ArgumentError, match=f"rank 1 is already taken by process {os.getpid()}"):
            join(job, 1, 3)
        with pytest.raises(ArgumentError, match=f"rank 0 .* is already taken by process {os.getpid()}"):
            join(job, 0, 3)
        with join(job, 2, 3) as last:
            last.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert "rank 1 is already taken" in caplog.text


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (Place(1, 2, "", "guessed"), "does not know the nonce"),
        (Place(1, 2, "", ""), "does not know the nonce"),
        (Place(1, 3, "", "nonce"), "rank 1 of 3 to a job of 2"),
    ],
)
def test_a_rank_of_another_job_is_refused_and_told_and_the_start_goes_on(job, caplog, place, reason):
    with join(job, 0, 2, "nonce") as store:
        with pytest.raises(ArgumentError, match=reason):
            join(job, place.rank, place.size, place.nonce)
        with join(job, 1, 2, "nonce") as other:
            store.set("key", b"value")
            assert other.get("key", 10) == b"value"
    assert reason in caplog.text


def test_strangers_that_are_silent_or_talk_nonsense_do_not_block_the_start(job, caplog):
    with (
        join(job, 0, 2) as store,
        connect(address(job)),
        connect(address(job)) as babbler,
        connect(address(job)) as array,
    ):
        babbler.send(b"\xff\0" * 1000)
        array.send(json.dumps(["rank"]).encode())
        assert babbler.recv(100) == array.recv(100) == b""  # hung up
        with join(job, 1, 2) as other:
            other.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert caplog.text.count("does not speak like a rank") == 2


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_and_the_start_goes_on(job, caplog):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.connect('\\0' + sys.argv[1]); s.send(sys.argv[2].encode()); print(s.recv(100))"
    )
    hello = json.dumps({"rank": 1, "size": 2, "nonce": ""})
    command = [sys.executable, "-I", "-S", "-c", code, address(job)[1:], hello]
    with join(job, 0, 2) as store:
        refused = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert "welcome" not in refused.stdout
        with join(job, 1, 2) as other:
            other.set("key", b"value")
            assert store.get("key", 10) == b"value"
    assert "belongs to user 65534, not to user 0" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_address_that_another_user_holds_is_not_trusted(job, caplog):
    code = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
        "s.bind('\\0' + sys.argv[1]); s.listen(); print('here', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-S", "-c", code, address(job)[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as thief:
        thief.stdout.readline()
        with pytest.raises(CollectiveTimeout, match="rank 0 of 2"):
            join(job, 1, 2, timeout=0.1)
        with pytest.raises(ArgumentError, match=f"already taken by process {thief.pid} of user 65534"):
            join(job, 0, 2)
        thief.stdin.close()
    assert caplog.text.count("belongs to user 65534, not to user 0") == 1


def test_a_rank_0_that_leaves_early_is_lost(job):
    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join, job, 1, 3)
        rank_0 = join(job, 0, 3)
        with rank_1.result() as store:
            waiting = pool.submit(store.get, "key", 20)
            rank_0.thing.close()
            with pytest.raises(PeerLost, match="rank 0 has left the start") as raised:
                waiting.result()
            assert raised.value.rank == 0
            with pytest.raises(PeerLost, match="rank 0 has left the start"):
                store.set("key", b"")


def test_rank_0_serves_on_until_the_others_have_left(job):
    with ThreadPoolExecutor() as pool:
        rank_0 = join(job, 0, 2).thing
        rank_0.set("key", b"value")
        with join(job, 1, 2) as store:
            leaving = pool.submit(rank_0.close)
            assert store.get("key", 10) == b"value"
            assert not leaving.done()
        leaving.result()


def test_a_rank_that_stays_cannot_keep_rank_0(job, monkeypatch):
    monkeypatch.setattr(rendezvous, "LINGER", 0.01)
    rank_0 = join(job, 0, 2)
    with join(job, 1, 2):
        rank_0.thing.close()


def test_a_message_too_long_for_a_packet_is_refused(job):
    with join(job, 0, 1) as store, pytest.raises(ArgumentError, match="65536"):
        store.set("key", bytes(1 << 17))


def test_the_second_start_of_a_job_does_not_meet_the_first(job, monkeypatch):
    monkeypatch.setattr(rendezvous, "_starts", itertools.count())
    for number in range(2):
        with open_store(Place(0, 2, job), 20) as store, join(f"{job}#{number}", 1, 2) as other:
            store.set("key", b"%d" % number)
            assert other.get("key", 20) == b"%d" % number


def test_one_rank_needs_no_socket(job):
    with open_store(Place(0, 1, job), 1) as store:
        store.set("key", b"value")
        assert store.get("key", 1) == b"value"
    assert job not in Path("/proc/net/unix").read_text()
