"""`ringcomm run`: start a program on several ranks of this machine, or of several."""

import argparse
from functools import partial

from ringcomm.bootstrap.wire.addresses import join_address
from ringcomm.bootstrap.wire.keepalive import KEEPALIVE
from ringcomm.config import MAX_KEEPALIVE, Config, start_logging
from ringcomm.errors import refuse
from ringcomm.launcher.nodes import MAX_NODES, NodeOptions
from ringcomm.launcher.run import run as launch
from ringcomm.launcher.secret import find_secret
from ringcomm.options import module, positive, several, whole

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ringcomm run -n N [options] [--] (script.py | -m module | program) [argument ...]"
    parser.description = (
        "Start a program on several ranks of this machine. Each line of output begins with its rank; rank 0 reads the "
        "standard input. When a rank fails, the others have 5 s to end; the exit status is that of the first failure. "
        "On several machines, the nodes, start it once on each: with the same --nnodes, --master-addr, --master-port "
        "and secret, and each with a --node-rank of its own."
    )
    parser.add_argument(
        *("-n", "-np", "--ranks"), type=int, required=True, metavar="N", help="number of ranks, on this node"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log the cores of each rank, and which nodes come")
    parser.add_argument(
        "--bind",
        choices=("core", "none"),
        help="core: each rank runs on cores of its own, an equal share; the default where there are enough",
    )
    parser.add_argument(
        "--threads-per-rank",
        type=whole(1),
        metavar="T",
        help="OMP_NUM_THREADS of each rank, which runs on T cores of its own, whole physical ones, where there are "
        "enough. By default a rank has as many threads as cores of its own, and 1 where ranks outnumber the cores, "
        "unless OMP_NUM_THREADS is set",
    )
    parser.add_argument(
        "--preload",
        type=several(module),
        default=[],
        metavar="MODULES",
        help="import these modules once, as in numpy,torch, and fork the ranks from that process: a start takes a part "
        "of the time. What modules read from the environment as they are imported, they have read before the program",
    )
    parser.add_argument("--mpi4py", action="store_true", help="run a program for mpi4py, without MPI: docs/mpi4py.md")
    parser.add_argument(
        "--respawn",
        type=whole(0),
        metavar="N",
        help="a failing rank does not end the others, and is restarted, at most N times each: docs/elastic.md",
    )
    nodes = parser.add_argument_group("several nodes")
    nodes.add_argument("--nnodes", type=whole(1), metavar="N", help="number of nodes (1)")
    nodes.add_argument("--node-rank", type=whole(0), metavar="K", help="which one this is: 0 to N - 1")
    nodes.add_argument("--master-addr", metavar="ADDRESS", help="the address of node 0 at which the others reach it")
    nodes.add_argument("--master-port", type=whole(1), metavar="PORT", help="a free port there")
    nodes.add_argument(
        "--secret-file", metavar="FILE", help="holds the secret of the job instead of RINGCOMM_JOB_SECRET"
    )
    nodes.add_argument(
        "--start-timeout", type=positive, default=300.0, metavar="S", help="seconds for all nodes to come (300)"
    )
    nodes.add_argument(
        "--keepalive",
        type=positive,
        default=KEEPALIVE,
        metavar="S",
        help=f"seconds after which a node that does not answer is lost ({KEEPALIVE:g})",
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program to run, and its arguments")
    parser.set_defaults(usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    command = ["-m", *arguments.module] if arguments.module else arguments.program
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        arguments.usage_error("nothing to run: expected a script, -m and a module, or a program")
    placement = _placement(arguments)
    if arguments.nnodes is None and (given := [option for option, value in placement.items() if value is not None]):
        arguments.usage_error(f"{', '.join(given)} without --nnodes, the number of nodes")
    start_logging("info" if arguments.verbose else None)
    start = partial(
        launch,
        command,
        arguments.ranks,
        bind={None: None, "core": True, "none": False}[arguments.bind],
        threads=arguments.threads_per_rank,
        mpi4py=arguments.mpi4py,
        max_restarts=arguments.respawn,
        modules=arguments.preload,
    )
    if arguments.nnodes in (None, 1):
        return start()
    if missing := [option for option, value in placement.items() if value is None]:
        arguments.usage_error(f"--nnodes {arguments.nnodes} needs {', '.join(missing)}")
    for option, value, most in (
        ("--nnodes", arguments.nnodes, MAX_NODES),
        (f"--node-rank with --nnodes {arguments.nnodes}", arguments.node_rank, arguments.nnodes - 1),
        ("--master-port", arguments.master_port, 65535),
        ("--keepalive", arguments.keepalive, MAX_KEEPALIVE),
    ):
        if value > most:
            arguments.usage_error(str(refuse(option, f"at most {most:g}", value)))
    config = Config()
    address = join_address(arguments.master_addr.removeprefix("[").removesuffix("]"), arguments.master_port)
    options = NodeOptions(
        arguments.node_rank,
        arguments.nnodes,
        address,
        find_secret(arguments.secret_file, address),
        arguments.start_timeout,
        arguments.keepalive,
        config.tls,
        elastic=arguments.respawn is not None,
        bound=next(iter(config.bind_addresses), ""),
    )
    if not arguments.verbose:
        start_logging(config.log)
    return start(options=options)


def _placement(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "--node-rank": arguments.node_rank,
        "--master-addr": arguments.master_addr,
        "--master-port": arguments.master_port,
    }
