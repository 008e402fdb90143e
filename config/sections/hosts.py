"""Settings of an executor that runs on other hosts than the other stages: docs/parallel.md."""

from typing import Annotated

from msgspec import Meta

from pipeline.config.sections.base import Frozen, Seconds


class RaySettings(Frozen, frozen=True):
    """Ray, which finds hosts for the executor if execute.launcher is "ray"."""

    address: Annotated[
        str,
        Meta(
            description='Of a Ray cluster, such as "10.0.0.1:6379"; "auto" is the one that runs on this machine. Empty '
            "starts a Ray of its own on this machine, for this server alone."
        ),
    ] = ""
    bundle_cpus: Annotated[
        int,
        Meta(ge=0, le=4096, description="CPUs that Ray reserves on the executor's host; 0 is one for each rank."),
    ] = 0
    placement_timeout_s: Annotated[
        Seconds, Meta(description="How long to wait until a host has room for the executor.")
    ] = 60.0


class TransportSettings(Frozen, frozen=True):
    """How processes on other hosts are reached. These connections are always encrypted."""

    host: Annotated[
        str,
        Meta(
            min_length=1,
            description="IP address of this machine at which processes on other hosts reach it. With a loopback "
            "address, they must run on this machine too.",
        ),
    ] = "127.0.0.1"
    ports: Annotated[
        str,
        Meta(
            description="TCP ports on which the processes of this server may listen for each other, such as "
            '"40000-40100", on all hosts; empty is any free port.'
        ),
    ] = ""
    host_timeout_s: Annotated[
        Seconds,
        Meta(description="A host that does not answer for this long is lost; its executor is started elsewhere."),
    ] = 10.0
