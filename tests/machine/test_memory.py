"""The headroom for shared memory, from control groups in a fake root folder."""

import subprocess
import sys

import pytest

from ringcomm import MemoryShortage
from ringcomm.machine import memory

MIB = 1 << 20
MEMINFO = "MemTotal: 4096000 kB\nMemFree: 1000 kB\nMemAvailable: 2048000 kB\n"
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes a root folder with these files and 2,000 MiB of available memory."""

    def make(**files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def make_v2(machine, **group):
    files = {f"sys/fs/cgroup/job/step/{name}": text for name, text in group.items()}
    return machine(**{"proc/self/cgroup": "0::/job/step\n", "proc/self/mountinfo": V2, **files})


def test_without_control_groups_the_machine_is_the_limit(machine):
    assert memory.available(machine()) == memory.Headroom(2000 * MIB, "MemAvailable of this machine")


def test_inactive_file_pages_of_a_group_count_as_free(machine):
    root = make_v2(
        machine,
        **{
            "memory.max": f"{100 * MIB}\n",
            "memory.current": f"{90 * MIB}\n",
            "memory.stat": f"anon 5\ninactive_file {20 * MIB}\nactive_file 7\n",
        },
    )
    found = memory.available(root)
    assert found.bytes == 30 * MIB
    assert found.limit == f"memory.max of {root}/sys/fs/cgroup/job/step is 100.0 MiB, of which 70.0 MiB are in use"


def test_a_group_without_limit_has_that_of_its_parent(machine):
    root = make_v2(machine, **{"memory.max": "max\n", "memory.current": "4096\n"})
    (root / "sys/fs/cgroup/job/memory.max").write_text(f"{50 * MIB}\n")
    (root / "sys/fs/cgroup/job/memory.current").write_text(f"{10 * MIB}\n")
    assert memory.available(root).bytes == 40 * MIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    root = make_v2(machine, **{"memory.max": "4096\n", "memory.current": "8192\n"})
    assert memory.available(root).bytes == 0


def test_cgroup_v1_is_read_in_a_container_that_shows_only_its_own_group(machine):
    group = "sys/fs/cgroup/memory/"
    root = machine(
        **{
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc/inner\n",
            "proc/self/mountinfo": V1,
            f"{group}memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}memory.usage_in_bytes": "4096\n",
            f"{group}inner/memory.limit_in_bytes": f"{64 * MIB}\n",
            f"{group}inner/memory.usage_in_bytes": f"{60 * MIB}\n",
            f"{group}inner/memory.stat": f"inactive_file 1\ntotal_inactive_file {6 * MIB}\n",
        }
    )
    assert memory.available(root).bytes == 10 * MIB


def test_this_machine_has_some_memory():
    assert memory.available().bytes > 0
    memory.require(1, "a byte")


def test_a_shortage_has_figures():
    with pytest.raises(MemoryShortage, match=r"a world needs 1,099,511,627,776\.0 MiB, but only .+ MiB are") as raised:
        memory.require(1 << 60, "a world")
    assert raised.value.expected == 1 << 60
    assert 0 < raised.value.got < 1 << 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_process_is_named(name):
    code = (
        "import resource, sys; from ringcomm.machine import memory; "
        "pages = int(open('/proc/self/statm').read().split()[0]) if sys.argv[1] == 'RLIMIT_AS' else 0; "
        "limit = pages * resource.getpagesize() + (64 << 20); "
        "resource.setrlimit(getattr(resource, sys.argv[1]), (limit, limit)); "
        "print(memory.available().bytes >> 20, memory.available().limit)"
    )
    found = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout
    assert name in found
    assert 60 <= int(found.split()[0]) <= 64
