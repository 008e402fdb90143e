"""`pipeline deploy`."""

import argparse
import sys

from pipeline.cli.commands.settings import SERVE_FLAGS, Commands, add_flags, add_settings, settings_of
from pipeline.config.load import ConfigError
from pipeline.errors import UserError

FAILED = 1


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
    parser.add_argument("--min-replicas", type=int, metavar="N", help="autoscaling: least number of replicas")
    parser.add_argument("--max-replicas", type=int, metavar="N", help="autoscaling: greatest number of replicas")
    parser.add_argument(
        "--target-open-requests",
        type=float,
        metavar="N",
        help="autoscaling: open requests of a replica to aim at (16)",
    )
    parser.add_argument("--servers", metavar="URL,URL", help="relay to these servers instead of starting replicas")
    parser.set_defaults(run=_deploy)


def _deploy(args: argparse.Namespace) -> int:
    from pipeline.deploy.ingress import IngressSettings

    settings = settings_of(args)
    ingress = IngressSettings(
        host=settings.gateway.host,
        port=settings.gateway.port,
        drain_timeout_s=settings.supervisor.drain_timeout_s,
    )
    try:
        if args.servers is not None:
            return _relay(args, ingress)
        raise ConfigError(["not yet"])
    except UserError as error:
        print(f"pipeline deploy: error: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:  # the address is not available
        raise ConfigError([str(error)]) from error


def _relay(args: argparse.Namespace, ingress: "object") -> int:
    from pipeline.deploy import run
    from pipeline.deploy.ingress import IngressSettings
    from pipeline.deploy.replicas import address_of

    assert isinstance(ingress, IngressSettings)
    given = [one.strip() for one in args.servers.split(",") if one.strip()]
    if not given:
        raise ConfigError(["--servers: name at least one server, as http://127.0.0.1:8001"])
    addresses = [address_of(url) for url in given]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(["--servers: a server is named twice"])
    return run.serve(addresses, ingress)
