"""Messages that the agent of another host receives; see pipeline/hosts/agent.py."""

from pipeline.runtime.messages.common import Message, Ping, Stop
from pipeline.runtime.messages.lifecycle import Launch


class Spawn(Message, frozen=True, tag="spawn"):
    """Start a process, in place of the one of its name. The agent adds the descriptors to the launch."""

    launch: Launch
    group: int
    """A number that the ranks which share memory have in common, and no earlier ones had."""
    num_threads: int
    """For libraries; 0: one per core of the host."""


class EndChild(Message, frozen=True, tag="end_child"):
    """Kill a process, if it has this incarnation. With `abort`, it writes the stacks of its threads first."""

    name: str
    incarnation: int
    abort: bool


HostInbox = Spawn | EndChild | Ping | Stop
