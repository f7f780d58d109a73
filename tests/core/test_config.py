"""Argument › Config › RINGCOMM_* › default."""

import dataclasses
import logging
import pickle
import re
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ringcomm
from harness.jobs import run_job
from ringcomm import ArgumentError, Config
from ringcomm.bootstrap.store import HashStore
from ringcomm.config import LAUNCHER, PREFIX, start_logging
from ringcomm.native import ffi, lib
from ringcomm.options import readable
from ringcomm.start import connect
from ringcomm.transports import shm
from ringcomm.transports.choice import find_transports


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in dataclasses.fields(Config):
        monkeypatch.delenv(PREFIX + name.name.upper(), raising=False)


def test_arguments_override_the_environment(monkeypatch):
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "2.5")
    monkeypatch.setenv("RINGCOMM_ONE_SHOT_BYTES", "1")
    config = Config(timeout=7.0)
    assert (config.timeout, config.one_shot_bytes) == (7.0, 1)


@pytest.mark.parametrize("field", dataclasses.fields(Config), ids=lambda field: field.name)
def test_every_field_reads_the_variable_of_its_own_name(field, monkeypatch):
    default = getattr(Config(), field.name)
    text = {
        "kernels": "avx2",
        "log": "debug",
        "segment_bytes": "64",
        "link": "ucx",
        "topology": "1x1x1",
        "port_range": "29500",
        "tls": "a,b,c",
    }.get(field.name, "1")
    monkeypatch.setenv(PREFIX + field.name.upper(), text)
    assert str(getattr(Config(), field.name)) in (text, "1.0", "True")
    monkeypatch.setenv(PREFIX + field.name.upper(), "")
    assert getattr(Config(), field.name) == default


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("TIMEOUT", "soon", "RINGCOMM_TIMEOUT: expected a finite number of seconds > 0, got 'soon'"),
        ("TIMEOUT", "-1", "RINGCOMM_TIMEOUT: expected a finite number of seconds > 0, got -1"),
        (
            "KEEPALIVE",
            "86401",
            r"RINGCOMM_KEEPALIVE: expected a finite number of seconds > 0, at most 86400, got 86401",
        ),
        ("ARENA_BYTES", "8M", "RINGCOMM_ARENA_BYTES: expected an integer, got '8M'"),
        ("PORT_RANGE", "some", "RINGCOMM_PORT_RANGE: expected a port, or a range such as 29500-29510, .*, got 'some'"),
        ("PORT_RANGE", "0", "RINGCOMM_PORT_RANGE: expected .* from 1024 to 65535, got '0'"),
        ("PORT_RANGE", "80-2000", "RINGCOMM_PORT_RANGE: expected .* from 1024 to 65535, got '80-2000'"),
        ("PORT_RANGE", "65000-65536", "RINGCOMM_PORT_RANGE: expected .* from 1024 to 65535, got '65000-65536'"),
        ("PORT_RANGE", "2000-1999", "RINGCOMM_PORT_RANGE: expected .* got '2000-1999'"),
        (
            "BIND_ADDRESS",
            "a,,b",
            "RINGCOMM_BIND_ADDRESS: expected an address, or several different ones .*, got 'a,,b'",
        ),
        (
            "HOST_ADDRESS",
            "fd00::1,10.0.0.1:29500",
            r"RINGCOMM_HOST_ADDRESS: expected addresses without a port .*, got 'fd00::1,10.0.0.1:29500'",
        ),
        ("BIND_ADDRESS", "[fd00::1]:1024", r"RINGCOMM_BIND_ADDRESS: expected addresses without a port "),
        ("OVERSUBSCRIBED", "yes", "RINGCOMM_OVERSUBSCRIBED: expected True or False .*1 or 0.*, got 'yes'"),
        ("KERNELS", "avx9", "unknown value of RINGCOMM_KERNELS 'avx9'; did you mean 'avx2'"),
    ],
)
def test_a_wrong_variable_is_named(name, text, error, monkeypatch):
    monkeypatch.setenv(PREFIX + name, text)
    with pytest.raises(ArgumentError, match=error):
        Config()


def test_addresses_may_have_spaces_and_brackets():
    config = Config(host_address="10.0.0.1, [fd00::1] ,[fe80::1%eth0]", port_range="29500")
    assert config.host_addresses == ["10.0.0.1", "fd00::1", "fe80::1%eth0"]
    assert config.ports == range(29500, 29501)
    assert (Config().host_addresses, Config().ports) == ([], None)


def test_there_is_one_bound_address_or_one_for_each_address_of_the_host():
    assert Config(host_address="a,b", bind_address="0.0.0.0").bind_addresses == ["0.0.0.0"]
    with pytest.raises(ArgumentError, match=r"bind_address: expected one address, or as many as .* \('a'\)"):
        Config(host_address="a", bind_address="b,c")


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(ArgumentError, match="unknown setting 'tiemout'; did you mean 'timeout'"):
        Config(tiemout=3)


def test_an_unknown_variable_names_the_nearest(monkeypatch):
    monkeypatch.setenv("RINGCOMM_ARENA_BITES", "1")
    with pytest.raises(ArgumentError, match="'RINGCOMM_ARENA_BITES'; did you mean 'RINGCOMM_ARENA_BYTES'"):
        Config()


def test_every_field_is_documented_with_its_default():
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", Config.__doc__, re.MULTILINE)
    described = {name: " ".join(text.split()) for name, text in entries}
    assert list(described) == [field.name for field in dataclasses.fields(Config)]
    for name, text in described.items():
        value = getattr(Config(), name)
        shown = f"{value:g}" if isinstance(value, float) else "None" if value is None else readable(value)
        assert f"Default: {shown}." in text or f"{shown}, the default:" in text, name


@pytest.mark.parametrize("size", [2, 3, 64, 1 << 16])
def test_an_arena_beyond_what_is_documented_has_no_effect(size):
    documented = int(4.2 * (1 << 20) * size)

    def memory(arena_bytes):
        tuning = {"arena_bytes": arena_bytes, "segment_bytes": 1}
        return lib.rc_world_bytes(size, ffi.new("rc_tuning *", tuning))

    source = Path(ringcomm.__file__).with_name("config.py").read_text()
    assert "4.2 MiB times the number of ranks" in " ".join(source.split())
    assert memory(documented) == memory(512 << 30) > memory(documented // 4)


def test_the_variables_of_the_launcher_are_no_settings(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.setenv(name, "1")
    Config()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout": timeout} for timeout in (0, "3", True, float("nan"), float("inf"))),
        *({"arena_bytes": size} for size in (-1, 0, 1.5, None, 10**12, 2**70)),
        *({name: value} for name in ("transport", "algorithm", "host_id", "kernels", "log") for value in (3, "")),
        {"log": "loud"},
        {"kernels": "avx9"},
        {"oversubscribed": 2},
    ],
)
def test_an_invalid_value_is_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Config(**wrong)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shn", "unknown transport 'shn'; did you mean 'shm'"),
        ("mpi", r"transport: expected 'shm' \(launcher: ringcomm run, one host\), got 'mpi'"),
    ],
)
def test_a_transport_that_cannot_serve_the_job_is_refused(name, text, monkeypatch):
    for variable, value in zip(LAUNCHER, ("0", "1", "a job", "", "", "", "", ""), strict=True):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("RINGCOMM_TRANSPORT", name)
    with pytest.raises(ArgumentError, match=text):
        ringcomm.init()


def test_ranks_that_no_transport_connects_are_told_so(monkeypatch):
    monkeypatch.setattr("ringcomm.transports.choice.find_transports", lambda: {"shm": shm})
    for variable, value in zip(LAUNCHER, ("0", "2", "a job", "", "127.0.0.1:1", "", "", ""), strict=True):
        monkeypatch.setenv(variable, value)
    for name in (None, "shm"):
        reason = r"^no transport connects the ranks of this job \(launcher: ringcomm run, several hosts\)"
        with pytest.raises(ArgumentError, match=reason):
            ringcomm.init(config=Config(transport=name))


def test_a_transport_is_chosen_by_name():
    assert set(find_transports()) == {"shm", "mpi", "network"}
    for name in (None, "shm"):
        with ringcomm.init(config=Config(transport=name)) as comm:
            assert comm._router.name == "shm"
    with pytest.raises(ArgumentError, match="transport: expected 'mpi', since mpi_comm is given, got 'shm'"):
        ringcomm.init(config=Config(transport="shm"), mpi_comm=object())


def test_another_package_may_bring_a_transport(monkeypatch, tmp_path):
    (tmp_path / "fabric.py").write_text("from ringcomm.transports.shm import NEEDS_STORE, connect, serves\n")
    (tmp_path / "fabric-1.0.dist-info").mkdir()
    (tmp_path / "fabric-1.0.dist-info/entry_points.txt").write_text("[ringcomm.transports]\nfabric = fabric\n")
    monkeypatch.syspath_prepend(tmp_path)
    with ringcomm.init(config=Config(transport="fabric")) as comm:
        assert comm.all_reduce(np.ones(1)) == 1
    with pytest.raises(ArgumentError, match=r"unknown transport 'fabrics'; did you mean 'fabric'\?"):
        ringcomm.init(config=Config(transport="fabrics"))


@pytest.mark.parametrize("config", [0, 3, {"timeout": 3}])
def test_an_object_that_is_not_a_config_is_refused(config):
    with pytest.raises(ArgumentError, match=r"config: expected a ringcomm\.Config, got"):
        ringcomm.init(config=config)


def test_a_config_in_the_place_of_the_timeout_is_refused():
    with pytest.raises(ArgumentError, match="timeout: expected seconds; a Config is passed as config=…, got a Config"):
        ringcomm.init(Config())


def test_integers_of_numpy_become_ints_which_the_ranks_exchange_as_json():
    assert type(Config(arena_bytes=np.int64(1 << 20)).arena_bytes) is int


def test_a_config_can_be_pickled_but_not_changed():
    config = Config(timeout=5)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, timeout=6).timeout == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout = 1


# --- What the communicators of a process share ------------------------------------------------------------------------


def test_the_program_sets_the_log_level_unless_the_config_does(monkeypatch):
    logger = logging.getLogger("ringcomm")
    monkeypatch.setattr(logger, "level", logger.level)  # restored after the test
    for level in (logging.NOTSET, logging.ERROR):
        logger.setLevel(level)
        start_logging(Config().log)
        assert logger.level == level
    start_logging(Config(log="debug").log)
    assert logger.level == logging.DEBUG


def test_ranks_in_threads_add_one_handler(monkeypatch):
    logger = logging.getLogger("ringcomm")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    at_once = threading.Barrier(2)

    def make(make=logging.StreamHandler):
        with suppress(threading.BrokenBarrierError):  # only one thread is here
            at_once.wait(0.1)
        return make()

    monkeypatch.setattr(logging, "StreamHandler", make)
    threads = [threading.Thread(target=start_logging, args=("",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(logger.handlers) == 1


def kernels():
    return ffi.string(lib.rc_kernels_name()).decode()


@pytest.mark.ranks(1, world="processes", fresh=True)
def test_an_open_communicator_keeps_its_kernels(comm):
    """Select other kernels while `comm` is open, then with no communicator open."""

    def alone(**given):
        return connect(0, 1, HashStore(), Config(**given))

    best = kernels()
    others = [level for level in ("portable", "avx2", "avx512", "neon") if level != best]
    for level in others:
        with pytest.raises(ArgumentError, match=f"kernels: expected {best}, which other .*, got {level}"):
            alone(kernels=level)
    alone(kernels=best).close()
    comm.close()
    if best != "portable":
        with alone(kernels="portable"), alone():
            assert kernels() == "portable"
    with alone():
        assert kernels() == best


@pytest.mark.slow
def test_every_rank_refuses_a_wrong_setting(tmp_path):
    text = "import ringcomm\ntry:\n    ringcomm.init(timeout=60)\nexcept Exception as error:\n    print(error)"
    run = run_job(tmp_path, 3, text, RINGCOMM_ALGORITHM="rign")
    assert run.stdout.count("unknown algorithm 'rign'; did you mean 'ring'?") == 3
