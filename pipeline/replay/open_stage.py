"""Makes the `Stage` of a process: with sockets, or with those of a recording that is replayed."""

from typing import Any

from pipeline.replay.stage_recordings import Recordings
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Channels, Stage
from pipeline.runtime.transport.peer_channels import PeerChannels


def open_stage(launch: m.Launch, union: Any) -> Stage[Any]:
    """The stage of a launch, which receives messages of `union`. If the launch asks for a recording, it has begun."""

    def connect(control_requests: Any) -> Channels:
        if launch.replay is None:
            return PeerChannels(launch, union, control_requests)
        # Imported here: a stage that is not a replay needs neither this nor asyncio.
        from pipeline.replay.replay_channels import ReplayChannels

        return ReplayChannels(launch, launch.replay, union)

    return Stage(launch, connect, Recordings)
