"""Finds hosts with Ray: reserves room on them, starts an actor with an agent on each, and watches the actors.

    connect ──► placement group ──► an actor for each bundle ──► HostFound ──► watch ──► HostEnded

This is a process of its own (`ray.0`), because Ray ends a process whose raylet dies, and because it starts many
threads. No step passes through Ray: what it carries is the orders for each agent and its answer, both MessagePack.

If `ray.address` is empty, this process starts a Ray of its own, which ends with it. A Ray that was there before is left
as it is: when this process ends, Ray ends its actors and frees what they had reserved.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import pipeline
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.hosts import own_ray
from pipeline.hosts.placement import ACTOR_ENVIRONMENT, NOT_INSTALLED, bundle_of, problem_of
from pipeline.runtime import messages as m
from pipeline.runtime.child import report
from pipeline.runtime.transport import curve

CHECK_S = 0.2
"""How often a placement that waits for room is checked."""
START_ACTOR_S = 60.0
ENVIRON = {
    "RAY_DEDUP_LOGS": "0",  # the lines of the executor's log are not repetitions
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def run(launch: m.Launch) -> None:
    """Find a host for each of the orders, then watch until one ends. Raises UserError with a message for the user."""
    for name, value in ENVIRON.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(SystemExit):  # of a signal; the token of our own cluster is deleted first
        # A handler, not SIG_DFL: that would end this process without its `finally`. Nor SIG_IGN, which the entry point
        # of stages sets: the daemons that Ray starts would inherit that.
        _handle_signals(_exit)
        with contextlib.nullcontext() if launch.settings.ray.address else own_ray.environment():
            _run(launch)


def _run(launch: m.Launch) -> None:
    """As `run`, in the environment for the cluster."""
    ray = _import_ray()
    ended = threading.Event()
    try:
        _connect(ray, launch.settings)
        _handle_signals(_exit)  # Ray may have set its own
        actors = _create_actors(ray, launch)
        _handle_signals(lambda *_: ended.set())
        runs = {actor.run.remote(): name for name, actor in actors.items()}
        while not ended.is_set():
            done, _ = ray.wait(list(runs), timeout=CHECK_S)
            for one in done:
                report(launch, m.HostEnded(runs.pop(one), _end_of(ray, one)))
                ended.wait()  # the supervisor begins anew, with a process that has no past
    finally:
        _handle_signals(lambda *_: None)  # another one does not interrupt this
        ray.shutdown()


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _exit(*_: object) -> None:
    raise SystemExit


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UserError(NOT_INSTALLED) from error
    return ray


def _connect(ray: Any, settings: Settings) -> None:
    address = settings.ray.address
    options: dict[str, Any] = {"address": address} if address else own_ray.OPTIONS
    try:
        ray.init(namespace="pipeline", logging_level=logging.WARNING, log_to_driver=True, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = f"can't connect to {address!r}" if address else "can't start Ray on this machine"
        raise UserError(f"ray.address: {what}: {str(error).strip().splitlines()[0]}") from error


def _create_actors(ray: Any, launch: m.Launch) -> dict[str, Any]:
    """Start an agent for each of the orders, and report where. Returns the actors by the agent's name."""
    settings, orders = launch.settings, launch.host_orders
    bundle = bundle_of(settings)
    group = ray.util.placement_group([bundle] * len(orders), strategy="PACK")
    end_s = time.monotonic() + settings.ray.placement_timeout_s
    while not group.wait(CHECK_S):
        if time.monotonic() >= end_s:
            raise UserError(
                problem_of(bundle, _free(ray))
                or f"ray: no room for the executor within {settings.ray.placement_timeout_s:g} s "
                "(ray.placement_timeout_s)"
            )
    actor_class = ray.remote(_actor_class())
    root = str(Path(pipeline.__file__).parent)
    actors: dict[str, Any] = {}
    for number, one in enumerate(orders):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        )
        actor = actor_class.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            scheduling_strategy=strategy,
            max_restarts=0,
            runtime_env=ACTOR_ENVIRONMENT,
        ).remote(root, msgspec.msgpack.encode(one), settings.log_level, settings.log_format)
        actors[one.name] = actor
    for one in orders:
        report(launch, _found(ray, actors[one.name], one, settings))
    return actors


def _found(ray: Any, actor: Any, orders: m.HostOrders, settings: Settings) -> m.HostFound:
    """Wait for an agent. Raises UserError if it can't run."""
    try:
        answer, error, address = ray.get(actor.begin.remote(), timeout=START_ACTOR_S)
    except ray.exceptions.GetTimeoutError as problem:
        raise UserError(f"ray: an actor did not start within {START_ACTOR_S:g} s") from problem
    except ray.exceptions.RayError as problem:
        raise UserError(f"ray: an actor did not start: {_first_line(problem)}") from problem
    if error:
        raise UserError(error)
    own_node = ray.get_runtime_context().get_node_id()
    here = {node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own_node}
    if curve.is_loopback(settings.transport.host) and address not in here:
        raise UserError(
            f"transport.host is {settings.transport.host}, but the executor is on {address}, another machine: set "
            f"transport.host to the address at which {address} reaches this one"
        )
    return msgspec.msgpack.decode(answer, type=m.HostFound)


def _free(ray: Any) -> list[dict[str, float]]:
    """The free resources of each node that is alive."""
    from ray._private.state import available_resources_per_node  # no public function tells them by node

    free = available_resources_per_node()
    return [dict(free.get(node["NodeID"], {})) for node in ray.nodes() if node["Alive"]]


def _end_of(ray: Any, run_of_actor: Any) -> str:
    """Why an agent has ended."""
    try:
        ray.get(run_of_actor)
    except ray.exceptions.RayError as error:
        return _first_line(error)
    return "it heard nothing from the supervisor"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _actor_class() -> type:
    """The class of the actors. It is local to a function, so that Ray sends its code: before it runs, the other host
    need not find this package where Ray looks for it."""

    class StageHost:
        def __init__(self, root: str, orders: bytes, log_level: str, log_format: Any) -> None:
            """`root` is the folder of the package on the supervisor's host. If this host has it too, it is used here:
            it may be one that no interpreter finds by itself."""
            import importlib.util
            import os
            import sys

            entry = os.path.join(root, "runtime", "entry.py")  # noqa: PTH118 - as in that file
            if "pipeline" not in sys.modules and os.path.exists(entry):  # noqa: PTH110
                spec = importlib.util.spec_from_file_location("pipeline_entry", entry)
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                module.adopt_package()
            self.orders, self.log_level, self.log_format = orders, log_level, log_format

        def begin(self) -> tuple[bytes, str, str]:
            """Make the agent. Returns its `HostFound`, or an error; and the address by which Ray knows this host."""
            import socket

            import msgspec
            import ray

            address = ray.util.get_node_ip_address()
            try:
                from pipeline.errors import UserError
                from pipeline.hosts.agent import HostAgent
                from pipeline.runtime.log.logs import open_log
                from pipeline.runtime.messages import HostOrders
            except ImportError as error:
                return b"", f"Pipeline can't be imported on {socket.gethostname()} ({address}): {error}", address
            try:
                orders = msgspec.msgpack.decode(self.orders, type=HostOrders)
                open_log(orders.name, self.log_level, self.log_format)
                self.agent = HostAgent(orders, f"{socket.gethostname()} ({address})", address)
            except (UserError, msgspec.DecodeError) as error:
                return b"", str(error), address
            return msgspec.msgpack.encode(self.agent.found), "", address

        def run(self) -> None:
            self.agent.run()

    return StageHost
