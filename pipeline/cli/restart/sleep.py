"""`pipeline sleep` and `pipeline wake`: the executor of a running server leaves, and comes back."""

import argparse
import time

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server
from pipeline.errors import UserError
from pipeline.supervisor.admin.admin_client import Admin

TIMEOUT_S = 600.0


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the server does not do it."""
    began_s = time.monotonic()
    try:
        with Admin(choose_server(args)) as server:
            server.change_sleep(sleeps=args.sleeps, wakes_on_request=args.wake_on_request, timeout_s=TIMEOUT_S)
    except UserError as error:
        complain(f"pipeline {'sleep' if args.sleeps else 'wake'}", error)
        return 1
    print(f"{'asleep' if args.sleeps else 'awake'} after {time.monotonic() - began_s:.2f} s")
    return 0
