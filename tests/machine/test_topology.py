"""The cores this process may use, from control groups in a fake root folder."""

import os

import pytest

from ringcomm.machine import topology

V2 = "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def root(tmp_path):
    for folder in ("proc/self", "sys/fs/cgroup/job/step", "sys/fs/cgroup/cpu,cpuacct/job"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_the_cores_are_those_of_the_affinity_mask():
    assert topology.cores() == os.sched_getaffinity(0)


def test_without_control_groups_there_is_no_quota(root):
    assert topology.cpu_quota(root) is None


def test_the_tightest_quota_of_a_group_and_its_ancestors_wins(root):
    (root / "proc/self/cgroup").write_text("0::/job/step\n")
    (root / "proc/self/mountinfo").write_text(V2)
    (root / "sys/fs/cgroup/job/step/cpu.max").write_text("max 100000\n")
    assert topology.cpu_quota(root) is None
    (root / "sys/fs/cgroup/job/cpu.max").write_text("250000 100000\n")
    assert topology.cpu_quota(root) == 2.5


def test_the_cgroup_v1_quota_is_found_among_joined_controllers(root):
    (root / "proc/self/cgroup").write_text("3:memory:/other\n2:cpu,cpuacct:/job\n0::/\n")
    (root / "proc/self/mountinfo").write_text(V1 + V2)
    folder = root / "sys/fs/cgroup/cpu,cpuacct/job"
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert topology.cpu_quota(root) is None
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    assert topology.cpu_quota(root) == 0.5


@pytest.fixture
def eight(tmp_path):
    """Two last-level caches of two physical cores each, with two hardware threads: core n and n + 4."""
    for core in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        for level, shared in (
            (1, [core % 4, core % 4 + 4]),
            (3, [other for other in range(8) if other % 2 == core % 2]),
        ):
            index = folder / f"cache/index{level}"
            index.mkdir(parents=True)
            (index / "level").write_text(f"{level}\n")
            (index / "shared_cpu_list").write_text(",".join(map(str, shared)) + "\n")
        (folder / "topology").mkdir()
        (folder / "topology/core_cpus_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("available", "ranks", "expected"),
    [
        (range(8), 1, [set(range(8))]),
        (range(8), 2, [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        (range(8), 3, [{0, 4}, {2, 6}, {1, 3, 5, 7}]),
        (range(8), 4, [{0, 4}, {2, 6}, {1, 5}, {3, 7}]),
        (range(8), 8, [{0}, {4}, {2}, {6}, {1}, {5}, {3}, {7}]),
        ([1, 2, 6], 2, [{2, 6}, {1}]),
        ([1, 2, 6], 3, [{2}, {6}, {1}]),
    ],
)
def test_shares_are_neighbors_in_a_cache_and_whole_physical_cores(eight, available, ranks, expected):
    assert topology.shares(available, ranks, root=eight) == expected


@pytest.mark.parametrize(
    ("ranks", "threads", "expected"),
    [
        (2, 1, [{0, 4}, {1, 5}]),
        (3, 1, [{0, 4}, {2, 6}, {1, 5}]),
        (2, 2, [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        (2, 3, [{0, 4, 2}, {1, 5, 3}]),  # not six physical cores
    ],
)
def test_a_share_for_threads_has_as_many_cores_physical_ones_if_there_are_enough(eight, ranks, threads, expected):
    assert topology.shares(range(8), ranks, threads, eight) == expected


def test_a_domain_is_the_node_and_the_cache_of_all_cores(eight):
    for core in range(8):
        (eight / f"sys/devices/system/cpu/cpu{core}/node{core // 4}").mkdir()
    first = topology.domain({0}, eight)
    assert first[0] == 0
    assert topology.domain({4}, eight)[0] == 1
    assert topology.domain(range(8), eight) == (-1, -1)
    assert topology.domain({0, 1}, eight) in [first, (0, -1)]


def test_a_simulated_machine_is_filled_in_order():
    found = [topology.simulated_domain("2x2x4", rank) for rank in (0, 3, 4, 8, 15)]
    assert found == [(0, 0), (0, 0), (0, 1), (1, 2), (1, 3)]


def test_shares_of_cores_of_which_nothing_is_known(tmp_path):
    assert topology.shares({3, 5, 8}, 2, root=tmp_path) == [{3}, {5, 8}]
