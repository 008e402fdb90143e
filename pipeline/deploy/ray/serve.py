"""The Ray Serve application: a deployment of servers, and one ingress.

The ingress listens on a port of its own instead of Serve's proxy, so a stream is relayed by one process and not by
three. There is one, which owns the state of the router. Serve restarts it if it dies; the streams that it relayed break
then, as they do if a gateway dies.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from pipeline.config.load import ConfigError
from pipeline.config.settings import AccessLogSettings, Settings
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.deploy.ray.start import until_running
from pipeline.errors import UserError
from pipeline.hosts import own_ray
from pipeline.hosts.placement import ACTOR_ENVIRONMENT
from pipeline.runtime.log.logs import open_log
from pipeline.runtime.security.api_keys import Keys

APP = "pipeline"
SERVERS, INGRESS = "Server", "Ingress"
NO_RAY = "pipeline deploy: ray is not installed: run `.venv/bin/pip install -e '.[ray]'` in the clone"
TARGET_OPEN_REQUESTS = 16.0
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 30.0, 600.0
"""Ray Serve's defaults."""
STOP_S = 10.0
"""Added to the drain's time, within which Serve must stop."""
INGRESS_EXTRA_S = 30.0
"""Added to the time for a replica's start, within which the ingress must find one."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0


class DeploySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to deploy."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_open_requests: float = TARGET_OPEN_REQUESTS
    """Of a replica, for autoscaling."""
    upscale_delay_s: float = UPSCALE_DELAY_S
    """How long more replicas must be needed before they are started."""
    downscale_delay_s: float = DOWNSCALE_DELAY_S
    """How long fewer replicas must be needed before some are stopped."""
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    name: str = APP
    """Of the Ray Serve application."""
    address: str = ""
    """Of a Ray cluster; empty starts one on this machine, which ends with the command."""
    start_timeout_s: float = 300.0
    """Of a replica."""


class IngressActor:
    """The replica of the ingress's deployment."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, handle: Any, settings: bytes, start_timeout_s: float, keys: bytes
    ) -> None:
        """`settings` are msgpack of IngressSettings, and `keys` as of `Keys.packed`, or empty."""
        from pipeline.deploy.ray.replicas import RayReplicas

        given = msgspec.msgpack.decode(settings, type=IngressSettings)
        open_log("ingress", given.log_level, given.log_format)
        replicas = RayReplicas(handle)
        await replicas.start(start_timeout_s)
        self._ingress = Ingress(replicas, given, Keys.unpacked(keys) if keys else None)
        await self._ingress.start()

    async def url(self) -> str:
        return self._ingress.url

    async def drain(self) -> None:
        """Let open responses end, and refuse new ones."""
        await self._ingress.drain()


def deploy(settings: Settings, ingress: IngressSettings, what: DeploySettings, keys: Keys | None) -> int:
    """Deploy, and wait for SIGINT or SIGTERM. Then let open responses end, and stop; before replicas are ready, stop at
    once. `keys` are those that clients need. Raises ConfigError if ray is not installed, UserError if replicas can't
    start. The application is deleted on every path."""
    with contextlib.nullcontext() if what.address else own_ray.environment():
        return _deploy(settings, ingress, what, keys)


def _deploy(settings: Settings, ingress: IngressSettings, what: DeploySettings, keys: Keys | None) -> int:
    """As `deploy`, in the environment for the cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError([NO_RAY]) from error
    stop = threading.Event()
    deployed = False
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # Serve's own log lines of each replica would hide ours; `ray logs` has them.
        options = {"address": what.address} if what.address else own_ray.OPTIONS
        ray.init(**options, log_to_driver=False, logging_level="warning")
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        if what.name in serve.status().applications:
            raise UserError(f"--name: the cluster has an application {what.name!r} already; choose another name")
        deployed = True
        handle = _run(application(settings, ingress, what, keys), what, stop)
        if handle is None:
            return 0
        url = handle.url.remote().result(timeout_s=STOP_S)
        print(f"relaying on {url} to {what.min_replicas} replicas", file=sys.stderr, flush=True)
        stop.wait()
        with contextlib.suppress(TimeoutError):
            handle.drain.remote().result(timeout_s=ingress.drain_timeout_s + STOP_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ray.is_initialized():
            if deployed:
                serve.delete(what.name)
            if not what.address:
                serve.shutdown()
            ray.shutdown()
    return 0


def _run(app: Any, what: DeploySettings, stop: threading.Event) -> Any:
    """Run the application. Returns the handle of its ingress, or None if `stop` is set first. Raises UserError."""
    from ray import serve

    target = serve.RunTarget(app, name=what.name, route_prefix=None)
    try:
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        is_running = until_running(
            lambda: serve.status().applications.get(what.name),
            *(SERVERS, what.min_replicas, what.start_timeout_s + 2 * INGRESS_EXTRA_S, stop),
        )
    except (RuntimeError, TimeoutError) as error:
        raise UserError(f"replicas could not start: {error}; `serve status` and Ray's logs say more") from error
    return handle if is_running else None


def application(settings: Settings, ingress: IngressSettings, what: DeploySettings, keys: Keys | None) -> Any:
    """The application, for `serve.run`. API keys reach its processes as digests, in the arguments of their actors: in
    neither Serve's config nor an environment, which every user of the cluster's dashboard can read."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from pipeline.deploy.ray.replicas import ServerReplica

    # In a cluster of our own, the ingress is on the same machine.
    is_wildcard = bool(what.address) and settings.gateway.host in ("0.0.0.0", "::")
    # The ingress has the certificate, and each process has the keys already.
    gateway = msgspec.structs.replace(
        settings.gateway,
        port=0,
        zmq="off",
        host=settings.gateway.host if is_wildcard else "127.0.0.1",
        **dict.fromkeys(("api_keys_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), ""),
    )
    packed = b"" if keys is None else keys.packed()
    of_replica = msgspec.structs.replace(settings, gateway=gateway, keys=())
    scales = what.max_replicas > what.min_replicas
    options: dict[str, Any] = {"num_replicas": what.min_replicas}
    if scales:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=what.min_replicas,
                max_replicas=what.max_replicas,
                target_ongoing_requests=what.target_open_requests,
                upscale_delay_s=what.upscale_delay_s,
                downscale_delay_s=what.downscale_delay_s,
            )
        }
    servers = serve.deployment(
        name=SERVERS,
        max_ongoing_requests=settings.gateway.max_open_sequences,
        graceful_shutdown_timeout_s=ingress.drain_timeout_s + STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class="pipeline.deploy.ray.router.LeaseRouter"),
        ray_actor_options={
            "num_cpus": what.replica_cpus,
            "num_gpus": what.replica_gpus,
            "runtime_env": ACTOR_ENVIRONMENT,
        },
        **options,
    )(ServerReplica)
    bound = servers.bind(
        msgspec.msgpack.encode(of_replica),
        what.start_timeout_s,
        packed,
    )
    front = serve.deployment(
        name=INGRESS,
        num_replicas=1,
        graceful_shutdown_timeout_s=STOP_S,
        ray_actor_options={
            "num_cpus": 0,
            "resources": {"node:__internal_head__": 0.001},
            "runtime_env": ACTOR_ENVIRONMENT,
        },
    )(IngressActor)
    # The ingress waits longer than a replica, whose error says why.
    ingress = msgspec.structs.replace(ingress, access_log=AccessLogSettings())  # the replicas write it
    return front.bind(bound, msgspec.msgpack.encode(ingress), what.start_timeout_s + INGRESS_EXTRA_S, packed)
