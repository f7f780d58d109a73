"""A parameter server: servers hold shards of the parameters; workers pull values and push gradients."""

from ringcomm.parameter_server.server import ParameterServer
from ringcomm.parameter_server.worker import Worker

__all__ = ["ParameterServer", "Worker"]
