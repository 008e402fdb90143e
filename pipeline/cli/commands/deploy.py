"""`pipeline deploy`."""

import argparse
from typing import TYPE_CHECKING

from pipeline.cli import option_types as types
from pipeline.cli.commands.settings import SERVE_FLAGS, Commands, add_flags, add_settings, settings_of
from pipeline.cli.complain import complain
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.deploy.ingress import IngressSettings
    from pipeline.deploy.ray.serve import DeploySettings
    from pipeline.runtime.security.api_keys import Keys
    from pipeline.runtime.security.key_book import KeyBook

FAILED = 1
SCALING = ("target_open_requests", "upscale_delay", "downscale_delay")
RAY_ONLY = ("replicas", "min_replicas", "max_replicas", *SCALING, "replica_cpus", "ray_address", "name")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "deploy",
        help="serve a model with several replicas, on Ray Serve",
        description="Serve a model with several replicas, each a whole server, behind one address. Ctrl-C lets open "
        "streams end, then stops. With --servers, relay to servers that run already; this needs no Ray.",
        allow_abbrev=False,
    )
    add_settings(parser)
    add_flags(parser, SERVE_FLAGS)
    parser.add_argument("--replicas", type=int, metavar="N", help="number of replicas (1)")
    parser.add_argument("--min-replicas", type=int, metavar="N", help="autoscaling: least number of replicas (1)")
    parser.add_argument("--max-replicas", type=int, metavar="N", help="autoscaling: greatest number of replicas")
    parser.add_argument(
        "--target-open-requests", type=float, metavar="N", help="autoscaling: open requests of a replica to aim at (16)"
    )
    parser.add_argument(
        "--upscale-delay",
        type=types.duration,
        metavar="TIME",
        help="autoscaling: how long more replicas must be needed before they are started (30s)",
    )
    parser.add_argument(
        "--downscale-delay",
        type=types.duration,
        metavar="TIME",
        help="autoscaling: how long fewer replicas must be needed before some are stopped (10m)",
    )
    parser.add_argument(
        "--replica-cpus", type=float, metavar="N", help="CPUs of a replica (execute.num_threads if it is set, else 1)"
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="a Ray cluster that runs; by default one is started for the command"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the Ray Serve application (pipeline)")
    parser.add_argument("--servers", metavar="URL,URL", help="relay to these servers instead of starting replicas")
    parser.set_defaults(run=_deploy)


def _deploy(args: argparse.Namespace) -> int:
    from pipeline.deploy.ingress import IngressSettings

    settings = settings_of(args)
    ingress = IngressSettings(
        gateway=settings.gateway,
        limits=settings.limits,
        access_log=settings.access_log,
        drain_timeout_s=settings.supervisor.drain_timeout_s,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    try:
        if args.servers is not None:
            return _relay(args, settings, ingress)
        from pipeline.deploy.ray.serve import deploy

        what = deploy_settings(args, settings)
        return deploy(settings, ingress, what, _keys(settings))
    except UserError as error:
        complain("pipeline deploy", error)
        return FAILED
    except OSError as error:  # the address is not available
        raise ConfigError([str(error)]) from error


def deploy_settings(args: argparse.Namespace, settings: Settings) -> "DeploySettings":
    """What the options say. Raises ConfigError."""
    from pipeline.deploy.ray.serve import (
        APP,
        DOWNSCALE_DELAY_S,
        TARGET_OPEN_REQUESTS,
        UPSCALE_DELAY_S,
        DeploySettings,
    )

    scales = args.min_replicas is not None or args.max_replicas is not None
    if args.replicas is not None and scales:
        raise ConfigError(["--replicas is a fixed number: leave it out with --min-replicas and --max-replicas"])
    if scales and args.max_replicas is None:
        raise ConfigError(["--min-replicas needs --max-replicas"])
    for option in SCALING:
        if getattr(args, option) is not None and not scales:
            raise ConfigError([f"--{option.replace('_', '-')} needs --max-replicas"])
    least = (args.min_replicas or 1) if scales else (1 if args.replicas is None else args.replicas)
    most = args.max_replicas if scales else least
    name = "--min-replicas" if scales else "--replicas"
    for option, value in (
        (name, least if args.min_replicas is None else args.min_replicas),
        ("--max-replicas", most),
        ("--target-open-requests", args.target_open_requests),
    ):
        if value is not None and value < 1:
            raise ConfigError([f"{option}: must be at least 1, not {value:g}"])
    if most < least:
        raise ConfigError([f"--max-replicas: {most} is less than --min-replicas, {least}"])
    if args.replica_cpus is not None and args.replica_cpus < 0:
        raise ConfigError([f"--replica-cpus: must be 0 or more, not {args.replica_cpus:g}"])
    cpus = float(settings.execute.num_threads or 1) if args.replica_cpus is None else args.replica_cpus
    return DeploySettings(
        min_replicas=least,
        max_replicas=most,
        target_open_requests=args.target_open_requests or TARGET_OPEN_REQUESTS,
        upscale_delay_s=UPSCALE_DELAY_S if args.upscale_delay is None else args.upscale_delay,
        downscale_delay_s=DOWNSCALE_DELAY_S if args.downscale_delay is None else args.downscale_delay,
        replica_cpus=cpus,
        replica_gpus=1.0 if settings.execute.device == "cuda" else 0.0,
        name=args.name or APP,
        address=args.ray_address or "",
        start_timeout_s=settings.supervisor.start_timeout_s,
    )


def _keys(settings: Settings, book: "KeyBook | None" = None) -> "Keys | None":
    """The API keys, which `book` can read again. Raises ConfigError if there are none and the ingress may not listen
    without, as a server."""
    from pipeline.runtime.log.logs import open_log
    from pipeline.supervisor.shared import bind_policy

    return bind_policy.keys_of(settings, open_log("ingress", settings.log_level, settings.log_format), book=book)


def _relay(args: argparse.Namespace, settings: Settings, ingress: "IngressSettings") -> int:
    from pipeline.deploy import run
    from pipeline.deploy.replicas import address_of
    from pipeline.runtime.security.key_book import KeyBook

    given = [f"--{name.replace('_', '-')}" for name in RAY_ONLY if getattr(args, name) is not None]
    if given:
        raise ConfigError([f"{given[0]} is about replicas that are started: leave it out with --servers"])
    urls = [one.strip() for one in args.servers.split(",") if one.strip()]
    if not urls:
        raise ConfigError(["--servers: name at least one server, as http://127.0.0.1:8001"])
    addresses = [address_of(url) for url in urls]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(["--servers: a server is named twice"])
    book = KeyBook()

    def read_again() -> "Keys | None":
        again = settings_of(args)
        return book.read(again.gateway.api_keys_file, again.keys)[0]

    return run.serve(addresses, ingress, _keys(settings, book), read_again)
