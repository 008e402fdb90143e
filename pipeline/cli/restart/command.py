"""`pipeline restart`: replaces the processes of a stage of a running server, one after the other."""

import argparse
import sys

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server
from pipeline.errors import UserError
from pipeline.supervisor.admin.admin_client import Admin


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a process was not replaced."""
    try:
        if args.stage is None:
            raise UserError("name a STAGE, or replace the whole server with --new-version, --new-model or --set")
        if args.finish != "request" or args.closing_text or args.drain_timeout or args.stop_first:
            raise UserError(
                "--finish, --closing-text, --drain-timeout and --stop-first need --new-version or --new-model"
            )
        with Admin(choose_server(args)) as server:
            known = [stage.name for stage in server.stats().stages if stage.name != "supervisor.0"]
            names = [name for name in known if args.stage in (name, name.partition(".")[0])]
            if not names:
                raise UserError(f"there is no stage {args.stage!r}; this server has {', '.join(known)}")
            for name in names:
                print(f"{name}: starting its successor", file=sys.stderr)
                pause_s = server.restart(name, args.timeout)
                print(f"{name} was replaced; it was away for {pause_s * 1000:.0f} ms")
    except UserError as error:
        complain("pipeline restart", error)
        return 1
    return 0
