"""Launchers of several nodes that do not come, do not fit, or do not belong to the job."""

import re
import signal

import pytest

from harness.nodes import SECRET, finish
from ringcomm.launcher.secret import find_secret

pytestmark = pytest.mark.slow


@pytest.fixture
def program(job):
    return job.program("print(exchange())")


def check_started(*launchers):
    for launcher in launchers:
        status, out, err = finish(launcher)
        assert (status, len(out)) == (0, 1), err


@pytest.mark.parametrize(
    ("present", "missing", "seconds"),
    [([0, 2], "nodes 1 and 3 of 4 did not arrive", 4), ([1], r"the launcher of node 0 \(\S+\) did not answer", 1)],
)
def test_missing_nodes_are_named_on_all_that_have_come(job, program, present, missing, seconds):
    launchers = [job.start(node, 1, program, f"--start-timeout={seconds}", count=4) for node in present]
    for launcher in launchers:
        status, _, err = finish(launcher)
        assert status == 2
        assert re.match(f"ringcomm run: timed out: {missing} within {seconds} s", err)


@pytest.mark.parametrize(
    ("third", "reason"),
    [
        ({"node": 1}, "node 1 is already taken by"),
        ({"node": 2, "count": 4}, "expected a node of 3, got node 2 of 4"),
        ({"node": 2, "patch": "from ringcomm.launcher import nodes; nodes.VERSION = '0'"}, "; 0 on node 2"),
    ],
    ids=["rank", "count", "version"],
)
def test_nodes_that_do_not_fit_are_an_error_on_all(job, program, third, reason):
    job.count = 3
    launchers = job.start_first_two(program)
    launchers.append(job.start(ranks=1, program=program, **third))
    for launcher in launchers:
        status, _, err = finish(launcher)
        assert status == 2
        assert reason in err


@pytest.mark.parametrize(("node", "number"), [(0, signal.SIGINT), (1, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_ends_the_wait_for_the_others_on_all_nodes(job, program, node, number):
    job.count = 3
    launchers = job.start_first_two(program)
    launchers[node].send_signal(number)
    status, _, err = finish(launchers[1 - node])
    assert status == 2
    assert f"node {node} (" in err
    # One that is told to end, or hit outside of the wait, just ends.
    assert "KeyboardInterrupt" in err or "has ended" in err
    status, _, err = finish(launchers[node])
    assert status in (128 + number, -number)
    assert err == ""


def test_a_node_that_comes_after_the_failure_is_told(job, program):
    job.count = 3
    first = job.start(0, 1, program, patch="nodes.LATE = 20.0")
    wrong = job.start(2, 1, program, count=4)
    reason = "expected a node of 3, got node 2 of 4"
    assert reason in finish(wrong)[2]
    assert reason in finish(job.start(1, 1, program))[2]
    late = job.start(2, 1, program)  # the last, after which node 0 need not wait
    assert reason in finish(late)[2]
    assert reason in finish(first)[2]


def test_a_launcher_with_another_secret_is_refused_and_the_job_starts(job, program):
    first = job.start(0, 1, program)
    status, _, err = finish(job.start(1, 1, program, secret="x" * 64))
    assert status == 2
    assert "has another secret" in err
    second = job.start(1, 1, program)
    check_started(second)
    status, out, err = finish(first)
    assert (status, len(out)) == (0, 1)
    assert "ringcomm WARNING: refused 127.0.0.1 port" in err
    assert "it sent a wrong secret" in err


def test_untrusted_peers_cannot_keep_the_job_from_starting(job, program):
    first = job.start(0, 1, program)
    peers = [job.connect()]
    try:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4, b"\xff" * 100_000, b"\0\0\0\x40" + b"x" * 64, b"\0"):
            peers.append(job.connect())
            peers[-1].sendall(garbage)
        peers += [job.connect() for _ in range(300)]  # silent ones, which hold their connections
        second = job.start(1, 1, program)
        check_started(second)
    finally:
        for peer in peers:
            peer.close()
    status, out, err = finish(first)
    assert (status, len(out)) == (0, 1)
    assert "it sent no secret" in err
    assert "it sent a wrong secret" in err
    assert "connections without a proof of the secret" in err
    assert len(err.splitlines()) < 20


def test_an_untrusted_peer_that_listens_in_place_of_node_0_gets_no_proof_to_use(job, program):
    job.reserved.listen()
    second = job.start(1, 1, program, "--start-timeout=2")
    peer, _ = job.reserved.accept()
    with peer:
        peer.sendall(len(b"hello").to_bytes(4, "big") + b"hello")
        assert peer.recv(1) == b""  # it hangs up
    status, _, err = finish(second)
    assert status == 2
    assert ") did not answer within 2 s" in err


def test_the_secret_may_come_from_a_file_of_the_user_alone(job, program, tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o644)
    option = f"--secret-file={file}"
    status, _, err = finish(job.start(0, 1, program, option, secret=""))
    assert status == 2
    assert f"other users can read the secret in {file}" in err
    file.chmod(0o600)
    check_started(job.start(0, 1, program, option, secret=""), job.start(1, 1, program))


def test_launchers_in_ranks_of_another_job_make_a_secret_of_their_own(job, monkeypatch, tmp_path):
    monkeypatch.setenv("RINGCOMM_RANK", "0")
    check_started(
        *(job.start(node, 1, job.program(f"assert place.secret != {SECRET!r}; print()")) for node in range(2))
    )
    monkeypatch.setenv("RINGCOMM_JOB_SECRET", SECRET)
    here, there = (find_secret(None, address) for address in ("10.0.0.1:1", "10.0.0.2:1"))
    assert here == find_secret(None, "10.0.0.1:1") != there
    (file := tmp_path / "secret").write_text(SECRET)
    file.chmod(0o600)
    assert find_secret(str(file), "10.0.0.1:1") == SECRET


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        ([], "", "`openssl rand -hex 32`"),
        ([], "short", "the secret in RINGCOMM_JOB_SECRET has fewer than 32 bytes"),
        (["--secret-file=/dev/null"], "", "/dev/null"),
        (["--master-addr=0.0.0.0"], SECRET, "expected one address of this machine, not all, got '0.0.0.0'"),
        (["--master-addr=192.0.2.1"], SECRET, "cannot listen at 192.0.2.1"),
        (["--node-rank=2"], SECRET, "--node-rank with --nnodes 2: expected at most 1, got 2"),
        (["--master-port=99999"], SECRET, "--master-port: expected at most 65535, got 99999"),
        (["--secret-file=nope"], "", "--secret-file: cannot read 'nope': No such file or directory"),
    ],
)
def test_what_cannot_work_is_one_line_of_error(job, program, options, secret, words):
    status, _, err = finish(job.start(0, 1, program, *options, secret=secret))
    assert status == 2
    assert words in err
    assert "Traceback" not in err


def test_a_port_that_is_taken_is_an_error(job, program):
    job.reserved.listen()
    status, _, err = finish(job.start(0, 1, program))
    assert status == 2
    assert "Address already in use: node 0 listens there, the others have --node-rank 1, 2, …, " in err
    assert "and --master-port is free" in err


def test_a_node_that_comes_too_late_is_told_so(job, program):
    first = job.start(0, 1, program, "--start-timeout=3", patch="nodes.LATE = 3.0")
    missing = "timed out: node 1 of 2 did not arrive within 3 s"
    assert first.stderr.readline() == f"ringcomm run: {missing}\n"
    assert finish(job.start(1, 1, program)) == (2, [], f"ringcomm run: this node came too late: {missing}\n")
    assert finish(first)[0] == 2


def test_a_launcher_says_for_which_nodes_it_waits(job, program):
    first = job.start(0, 1, program, patch="from ringcomm.launcher import nodes; nodes.WARN_AFTER = 0.1")
    line = "timed out: node 1 of 2 did not arrive within 0.1 s; waiting up to 20 s (--start-timeout)"
    assert first.stderr.readline() == f"ringcomm WARNING: {line}\n"
    check_started(first, job.start(1, 1, program))


def test_a_launcher_that_has_said_so_waits_until_one_deadline(job, program):
    first = job.start(0, 1, program, "--start-timeout=1", patch="nodes.WARN_AFTER = 0.2")
    status, _, err = finish(first)
    assert status == 2
    missing = "timed out: node 1 of 2 did not arrive within"
    assert err.splitlines() == [
        f"ringcomm WARNING: {missing} 0.2 s; waiting up to 1 s (--start-timeout)",
        f"ringcomm run: {missing} 1 s",
    ]


def test_a_launcher_says_that_it_waits_for_node_0(job, program):
    second = job.start(1, 1, program, patch="nodes.WARN_AFTER = 0.1")
    node_0 = "the launcher of node 0 ({}:{})".format(*job.address)
    reason = "did not answer within 0.1 s (Connection refused)"
    line = f"timed out: {node_0} {reason}; waiting up to 20 s (--start-timeout)"
    assert second.stderr.readline() == f"ringcomm WARNING: {line}\n"
    check_started(second, job.start(0, 1, program))


def test_a_rank_that_ends_well_before_init_fails_that_of_a_rank_on_another_node_at_once(job):
    program = job.program("if rank: sys.exit()\nexchange()")
    first, second = (job.start(node, 1, program) for node in range(2))
    assert finish(second)[0] in (0, 1)
    status, _, err = finish(first)
    assert status == 1
    assert "PeerLost: rank 1 ended with status 0 before it had started" in err


def test_one_node_needs_neither_secret_nor_address(job):
    launcher = job.start(0, 1, job.program("print(place.hosts)"), count=1, secret="")
    assert finish(launcher) == (0, ["[0] False"], "")
