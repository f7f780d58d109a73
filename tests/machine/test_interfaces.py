"""Which interface has an address, and the bandwidth that it says."""

import subprocess
import sys

import pytest

from ringcomm.machine.interfaces import bandwidth, interface_of


def test_the_interface_that_has_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # of no host
    assert interface_of("no.such.host.invalid") == ""


def test_the_interface_that_has_a_second_address():
    script = "ip link set lo up; ip address add 10.5.0.1/24 dev lo; ip address add 10.5.0.2/24 dev lo; "
    script += "ip address add fd05::2/64 dev lo; exec $0 -c 'from ringcomm.machine.interfaces import interface_of; "
    script += 'print(*map(interface_of, ("10.5.0.1", "10.5.0.2", "fd05::2", "::1", "::1%lo", "::1%eth0", "fd05::3")))'
    command = ["unshare", "--net", "sh", "-ec", f"{script}'", sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if ended.returncode:
        pytest.skip(f"no network namespace: {ended.stderr.strip()}")
    assert ended.stdout == "lo lo lo lo lo  \n"


@pytest.fixture
def interface(tmp_path):
    def make(speed, *below):
        folder = tmp_path / "sys/class/net/eth0"
        folder.mkdir(parents=True)
        for name in below:
            (folder / name).symlink_to(tmp_path)
        (folder / "speed").write_text(f"{speed}\n")
        return bandwidth("eth0", tmp_path)

    return make


@pytest.mark.parametrize("below", ["device", "lower_eth1"])  # a card; a VLAN or a bond
def test_the_bandwidth_of_an_interface_is_what_the_kernel_says(interface, below):
    assert interface(1000, below) == 0.125


@pytest.mark.parametrize(("speed", "below"), [(-1, ["device"]), (0, ["device"]), ("", ["device"]), (10000, [])])
def test_a_virtual_interface_or_one_that_is_down_does_not_say(interface, speed, below):
    assert interface(speed, *below) is None


def test_no_interface_has_no_bandwidth(tmp_path):
    assert bandwidth("", tmp_path) is None
    assert bandwidth("eth0", tmp_path) is None
