"""The pytest plugin: `@pytest.mark.ranks(4)` calls a test on connected ranks (docs/testing.md).

pytest loads it wherever ringcomm is installed; ringcomm itself is imported for the first test with the mark.
"""

import sys

import pytest

WORLDS = {"processes": ["processes"], "threads": ["threads"], "both": ["processes", "threads"]}
MARK = "ranks(*sizes, world=None, env=None, fresh=False): call the test on ranks, connected by its argument comm"


def pytest_addoption(parser):
    parser.getgroup("ringcomm").addoption(
        "--ranks-world",
        choices=WORLDS,
        default="processes",
        help="what ranks are in tests whose mark does not say it (default: processes)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", MARK)


@pytest.fixture
def comm(request):
    """The communicator of a rank, in tests that are marked with ranks."""
    if not hasattr(request, "param"):
        pytest.fail("comm: expected a test that is marked with ranks, as @pytest.mark.ranks(4)", pytrace=False)
    return request.param


def pytest_generate_tests(metafunc):
    if mark := metafunc.definition.get_closest_marker("ranks"):
        from ringcomm.testing.marked import rank_specs

        worlds = WORLDS[metafunc.config.option.ranks_world]
        metafunc.parametrize("comm", rank_specs(metafunc, mark, worlds), indirect=True, ids=str)


def pytest_runtest_setup(item):
    if item.get_closest_marker("ranks") and "comm" not in getattr(item, "fixturenames", ()):
        pytest.fail("the mark ranks: expected a function or a method of a plain class", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker("ranks"):
        return None
    from ringcomm.testing.marked import call_on_ranks

    call_on_ranks(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.failed and item.get_closest_marker("ranks"):
        from ringcomm.testing.marked import FAILURE

        report.longrepr = item.stash.get(FAILURE, report.longrepr)
    return report


def pytest_unconfigure():
    if ranks := sys.modules.get("ringcomm.testing.ranks"):
        ranks.close_pools()
