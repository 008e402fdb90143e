"""Compares Pipeline with llama.cpp's server on .gguf files that it makes: ids, texts, chats, where replies end.

    python -m tools.compare_llama_server                        all files
    python -m tools.compare_llama_server --only spm             files whose names contain this
    python -m tools.compare_llama_server --list                 the files
    python -m tools.compare_llama_server --server PATH          another llama-server

It takes the llama-server that `tools/compare_peers --build-only --servers llama.cpp` builds (needs cmake, make and g++;
ten minutes on two cores). Differences on purpose have rules with names (rules.py), and are counted. Any other
difference is printed, and the exit code is 1. So it is for a rule that explains nothing, if all files were compared.
"""

import argparse
import http.client
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.out_file import output, require_writable
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.stages.prepare.cache import Cache
from tests.compiled import link_kernels
from tools.benchmarks.served import exit_code
from tools.compare_llama_server import servers, small_file
from tools.compare_llama_server.compare import Case, compare
from tools.compare_llama_server.rules import RULES, rule_of
from tools.compare_llama_server.variants import FileVariant, variants
from tools.compare_peers.llama_cpp import VERSION, LlamaCpp

BUILD = "tools/compare_peers --build-only --servers llama.cpp"
MAX_SHOWN = 10
"""Differences of a file that are printed."""
MAX_CHARS = 300
NUM_LAST_LINES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_llama_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", type=Path, metavar="PATH", help="llama-server; by default the one that was built")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="files whose names contain TEXT")
    parser.add_argument("--list", action="store_true", help="print the names of the files")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write all differences to FILE, one JSON object a line"
    )
    args = parser.parse_args(arguments)
    chosen = [variant for variant in variants() if not args.only or any(text in variant.name for text in args.only)]
    if args.list:
        print("\n".join(variant.name for variant in chosen))
        return 0
    return exit_code("compare_llama_server", lambda: run(args, chosen))


def server_program(given: Path | None) -> Path:
    """The llama-server to run. Raises UserError, with the command that makes one, if there is none."""
    program = given or LlamaCpp(Cache.of(Settings()).root / "peers", VERSION).server
    if not program.is_file():
        advice = "name a llama-server" if given else f"run `{BUILD}` once, or name a llama-server with --server PATH"
        raise UserError(f"{program} is missing: {advice}")
    return program


def run(args: argparse.Namespace, chosen: Sequence[FileVariant]) -> int:
    """Compare all files. Returns 1 if something differs without a rule."""
    program = server_program(args.server)
    if args.out is not None:
        require_writable(args.out, "--out")
    if not chosen:
        raise UserError("--only: no file has such a name; see --list")
    by_rule: Counter[str] = Counter()
    num_cases = num_wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="compare-llama-server-") as scratch,
        output(args.out or Path(os.devnull)) as out,
    ):
        folder = Path(scratch)
        cache = link_kernels(folder / "cache")
        for variant in chosen:
            try:
                cases = _cases_of(variant, program, folder, cache)
            except (UserError, OSError, http.client.HTTPException) as error:
                num_wrong += 1
                print(f"{variant.name}: {error}", flush=True)
                for name in ("llama-server", "pipeline"):
                    print("\n".join(_last_lines(folder / f"{name}.log")), flush=True)
                continue
            different = [case for case in cases if not case.is_equal]
            rules = [rule_of(case) for case in different]
            wrong = [case for case, rule in zip(different, rules, strict=True) if rule is None]
            by_rule.update(rule.name for rule in rules if rule is not None)
            num_cases, num_wrong = num_cases + len(cases), num_wrong + len(wrong)
            print(
                f"{variant.name}: {len(cases)} cases, {len(different) - len(wrong)} by rules, {len(wrong)} differ",
                flush=True,
            )
            for case in wrong[:MAX_SHOWN]:
                print(_shown(case), flush=True)
            for case, rule in zip(different, rules, strict=True):
                out.write(f"{_as_json(case, rule.name if rule else None)}\n".encode())
    print(f"\n{len(chosen)} files, {num_cases} cases, {num_wrong} differ without a rule")
    for rule in RULES:
        print(f"{by_rule[rule.name]:6} {rule.name}: {rule.reason}")
    idle = [rule.name for rule in RULES if not by_rule[rule.name]] if not args.only else []
    for name in idle:
        print(f"the rule {name!r} explains nothing: remove it")
    return 1 if num_wrong or idle else 0


def _cases_of(variant: FileVariant, program: Path, folder: Path, cache: Path) -> list[Case]:
    file = folder / "file.gguf"
    order = small_file.write(file, variant)
    with servers.both(program, file, cache, folder, _tell, specials_in_content=variant.is_chat) as (ours, theirs):
        return list(compare(variant, order, ours, theirs))


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return [f"    {line}" for line in lines[-NUM_LAST_LINES:]]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(case: Case) -> str:
    parts = (case.what, case.asked, case.ours, case.theirs)
    what, asked, ours, theirs = (
        text if len(text := repr(part)) < MAX_CHARS else text[:MAX_CHARS] + "…" for part in parts
    )
    return f"  {what} {asked}\n    Pipeline  {ours}\n    llama.cpp {theirs}"


def _as_json(case: Case, rule: str | None) -> str:
    fields = {
        "form": case.variant.name,
        "what": case.what,
        "asked": case.asked,
        "ours": case.ours,
        "theirs": case.theirs,
    }
    return json.dumps({**fields, "rule": rule}, ensure_ascii=False, default=str)


if __name__ == "__main__":
    sys.exit(main())
