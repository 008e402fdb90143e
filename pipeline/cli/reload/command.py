"""`pipeline reload`: changes the settings of a running server."""

import argparse
import sys
from pathlib import Path

import msgspec

from pipeline.cli.commands.settings import load_with_warnings, source_of
from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server
from pipeline.errors import UserError
from pipeline.supervisor.admin.admin_client import Admin
from pipeline.supervisor.reconfigure.changed_settings import Change, to_restart, to_scale


def run(args: argparse.Namespace) -> int:
    """Returns 1 if nothing was changed because a setting can't change, or a stage was not restarted. Raises
    ConfigError."""
    try:
        with Admin(choose_server(args)) as server:
            source = source_of(args) if args.config is not None else server.settings_source()
            if source is None:
                raise UserError(
                    "a program gave this server its settings: name the new ones with --config; or it has several "
                    "models: `pipeline restart --set models.NAME.KEY=VALUE` replaces it while streams go on"
                )
            # Options win over sets, and later ones over earlier ones.
            sets = [] if args.config is not None else [(f"--set {text}", text) for text in args.set]
            source = msgspec.structs.replace(source, options=[*source.options, *sets])
            path = Path(source.config) if source.config else None
            settings = load_with_warnings(path, source.sets, source.flags, source.options)
            found = server.reload(settings, source, args.timeout, is_dry_run=args.dry_run)
    except UserError as error:
        complain("pipeline reload", error)
        return 1
    for change in found.changes:
        print(line_of(change))
    if refused := [change.key for change in found.changes if change.refusal]:
        print(
            f"pipeline reload: error: nothing was changed: start a new server for {', '.join(refused)}", file=sys.stderr
        )
        return 1
    if found.problem:
        kept = "the other settings" if to_scale(found.changes) else "the settings"
        complain("pipeline reload", f"{found.problem}; {kept} stay as they were")
        return 1
    if found.keys:
        print(f"API keys: {found.keys}: used at once")
    if found.changes or not found.keys:
        print(summary(found.changes, args.dry_run))
    return 0


def line_of(change: Change) -> str:
    """What happens with one setting, for a terminal."""
    effect = f"needs a new server: {change.refusal}" if change.refusal else "used at once"
    if change.stages:
        effect = f"restarts {', '.join(change.stages)}"
    if change.scales:
        num = abs(change.after - change.before)
        effect = f"{'adds' if change.after > change.before else 'drains'} {num} process{'' if num == 1 else 'es'}"
    # Of API keys only the names are shown, which stay when a limit or a digest changes.
    what = f"{change.before} → {change.after}" if change.before != change.after else "changed"
    return f"{change.key}: {what}: {effect}"


def summary(changes: list[Change], is_dry_run: bool) -> str:
    if not changes:
        return "no setting has changed"
    restarted, scaled = ", ".join(to_restart(changes)), ", ".join(stage for stage, _ in to_scale(changes))
    done = [f"scale{'' if is_dry_run else 'd'} {scaled}"] if scaled else []
    if restarted or not scaled:
        done.append(f"restart{'' if is_dry_run else 'ed'} {restarted or 'no stage'}")
    return f"this would {' and '.join(done)}" if is_dry_run else f"changed; {' and '.join(done)}"
