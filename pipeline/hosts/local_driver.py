"""Finds this machine as the host of the executor: the agent runs in this process. Its processes are reached at tcp, as
on another host, but no Ray is needed. For tests and for measuring what tcp costs."""

import socket

from pipeline.hosts.agent import HostAgent
from pipeline.runtime import messages as m
from pipeline.runtime.child import report


def run(launch: m.Launch) -> None:
    """Run the agent until the supervisor ends it."""
    (orders,) = launch.host_orders
    agent = HostAgent(orders, socket.gethostname(), "127.0.0.1")
    report(launch, agent.found)
    agent.run()
