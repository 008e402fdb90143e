"""What the supervisor and the gateway of several models send each other, over a socket of packets that carries
descriptors too: a stage of the gateway begins with those of its `Launch`.

    supervisor ──StartStage, DropStage, Models, ReleaseModel──► gateway
    supervisor ◄──LoadModel, UnloadModel, KeepModel, ModelActivity, ModelReleased── gateway
"""

from typing import Literal

import msgspec

from pipeline.runtime.messages.lifecycle import Launch

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "sleeping", "failed"]

MAX_PACKET_BYTES = 128 * 1024
RETRY_S = 30.0
"""A model that has failed is loaded again by a request after this long; POST /models/load does it at once."""
MAX_FDS = 253
"""The kernel's limit of a packet."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of several models, as clients see it."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """Of the settings; a model that is loaded may have others."""
    state: ModelState = "unloaded"
    problem: str = ""
    """Why it failed, or can't be loaded."""
    since_s: float = 0.0
    """When it got this state, in Unix time."""
    num_bytes: int = 0
    """What it needs of memory_bytes; 0 if it is not known yet."""
    is_pinned: bool = False
    position: int = 0
    """Of those that wait to be loaded or woken: 1 is the next one. 0: it does not wait."""
    waits_for: tuple[str, ...] = ()
    """The models that must leave, or sleep, first."""
    waits_since_s: float = 0.0
    """Since when it waits, in Unix time."""
    num_turns: int = 0
    """How often it was put to sleep for another one."""
    expires_s: float = 0.0
    """When it is unloaded if no request comes, in Unix time; 0 if it stays, or is busy."""
    had_loaded: bool = False
    """Of one that failed: it was loaded before."""


class StartStage(msgspec.Struct, frozen=True, tag="start_stage"):
    """Begin a gateway stage. The packet has the descriptors that the launch names, in the order of `fds`, and one more
    whose end says that the stage has ended."""

    number: int
    launch: Launch
    fds: list[int]
    """The numbers that they have in the launch."""


class DropStage(msgspec.Struct, frozen=True, tag="drop_stage"):
    """End a stage at once."""

    number: int


class Models(msgspec.Struct, frozen=True, tag="models"):
    """All models, in the order of the settings. Sent whenever one changes."""

    models: list[ModelStatus]
    is_ready: bool = False
    """Those that are loaded at the start are, or can't be."""
    is_ending: bool = False
    """The server shuts down."""
    has_successor: bool = False
    """Another server listens at the same sockets: accept no more connections."""


class StopProcess(msgspec.Struct, frozen=True, tag="stop_process"):
    """All stages have ended: end the process."""


class ReleaseModel(msgspec.Struct, frozen=True, tag="release"):
    """A model is to be unloaded because it is idle: open no request of it any more, unless one is open. Answered with
    `ModelReleased`."""

    name: str


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """A client wants a model."""

    name: str
    is_asked_for: bool = False
    """By POST /models/load: also if it has just failed."""


class UnloadModel(msgspec.Struct, frozen=True, tag="unload"):
    """A client wants a model to leave. Its open streams have `supervisor.drain_timeout_s` to end."""

    name: str


class KeepModel(msgspec.Struct, frozen=True, tag="keep"):
    """How long a model stays without a request, in seconds from the end of the last one; below 0 for ever."""

    name: str
    idle_s: float


class ModelActivity(msgspec.Struct, frozen=True, tag="activity"):
    """Whether requests of a model are open. The end of the last one is reported a moment later, so that steady traffic
    reports nothing."""

    name: str
    is_busy: bool


class ModelReleased(msgspec.Struct, frozen=True, tag="released"):
    """The answer to `ReleaseModel`. If the model is idle, its requests wait from now on until it is loaded again."""

    name: str
    is_idle: bool


ToSharedGateway = StartStage | DropStage | Models | StopProcess | ReleaseModel
FromSharedGateway = LoadModel | UnloadModel | KeepModel | ModelActivity | ModelReleased
