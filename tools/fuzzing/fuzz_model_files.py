#!/usr/bin/env python3
"""Prepares mutated model files: each ends with a prepared model or a ModelError of one line, and with nothing else.

    tools/fuzzing/fuzz_model_files.py                             1000 cases
    tools/fuzzing/fuzz_model_files.py --cases 20000 --seed 7
    tools/fuzzing/fuzz_model_files.py --seed 7 --only 123         one case again, with its traceback

Valid small models (safetensors folders and .gguf files) are mutated: bytes flipped, cut, inserted and moved, numbers
and JSON values replaced by extreme ones, files replaced by folders, FIFOs, devices and links. Each is prepared in a
forked child with little memory (RLIMIT_AS) and time. A case fails if the child ends with a traceback, by a signal, or
not in time, if the error has more than one line, or if a model is accepted whose prepared folder the other stages could
not read. The files of failed cases are kept in the folder that --out names.

The exit code is 1 if a case fails. A case depends on its number and the seed alone.
"""

import argparse
import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # a process that forks must have one thread

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from pipeline.config.settings import PreparedFormat, Settings  # noqa: E402
from pipeline.errors import UserError  # noqa: E402
from pipeline.runtime.model.model_config import ModelConfig  # noqa: E402
from pipeline.runtime.model.model_folder import format_key  # noqa: E402
from pipeline.stages.execute.pooling.head import PoolerHead  # noqa: E402
from pipeline.stages.execute.weights import TensorFile  # noqa: E402
from pipeline.stages.prepare.sources.source import ModelError  # noqa: E402
from pipeline.stages.prepare.stage import prepare  # noqa: E402
from pipeline.stages.prepare.weights.tensors import expected_shapes  # noqa: E402
from pipeline.text.vocabulary import Vocabulary  # noqa: E402
from tools.fuzzing import models, mutations  # noqa: E402

ACCEPTED, REFUSED, FAILED = 0, 3, 1
"""Exit codes of a case's process."""
QUANTIZATIONS: tuple[PreparedFormat, ...] = ("auto", "auto", "none", "q8_0", "q4_1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default: 0)")
    parser.add_argument("--only", type=int, help="run a single case")
    parser.add_argument("--memory-mib", type=int, default=512, help="memory limit of a case (default: 512)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="time limit of a case (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="where failed cases are kept")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        originals = Path(folder) / "originals"
        originals.mkdir()
        built = models.build(originals)
        work = Path(folder) / "work"
        for model in built:  # the unmodified models are accepted; this also imports everything before the first fork
            prepared = prepare(Settings(model=str(model), cache_dir=str(Path(folder) / "cache")))
            read_as_stages_do(prepared)
        numbers = range(args.cases) if args.only is None else [args.only]
        for number in numbers:
            result, words = run_case(number, args, built, work)
            counts[result] += 1
            if result == "failed":
                print(f"case {number} of seed {args.seed} failed: {words}", flush=True)
                shutil.rmtree(args.out / f"{args.seed}-{number}", ignore_errors=True)
                keep(work, args.out / f"{args.seed}-{number}")
            elif args.only is not None:
                print(f"{result}: {words}")
            if (number + 1) % 500 == 0:
                print(f"{number + 1} cases: {describe(counts)}", flush=True)
    print(f"done, {sum(counts.values())} cases: {describe(counts)}")
    return 1 if counts["failed"] else 0


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[result]} {result}" for result in ("accepted", "refused", "failed"))


def run_case(number: int, args: argparse.Namespace, built: list[Path], work: Path) -> tuple[str, str]:
    """The result of a case, and its error message."""
    rng = random.Random(f"{args.seed}:{number}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    original = built[number % len(built)]
    model = work / original.name
    if original.is_dir():
        shutil.copytree(original, model)
    else:
        shutil.copyfile(original, model)
    mutated = mutations.spoil(model, rng, original if original.is_file() else original / "config.json")
    quantization = rng.choice(QUANTIZATIONS)
    settings = Settings(model=str(model), cache_dir=str(work / "cache"), quantization=quantization)
    log = work / "log"
    pid = os.fork()
    if pid == 0:
        child(settings, log, args.memory_mib)
    code = wait(pid, args.timeout_s)
    words = f"{mutated}: {log.read_text(errors='replace') if log.exists() else ''}"
    if code in (ACCEPTED, REFUSED):
        return ("accepted" if code == ACCEPTED else "refused"), words
    why = f"not finished within {args.timeout_s:g} s" if code is None else f"ended with code {code}"
    return "failed", f"{why}; {words}"


def child(settings: Settings, log: Path, memory_mib: int) -> None:
    """Prepare the model, and end this process."""
    code = FAILED
    try:
        most = psutil.Process().memory_info().vms + memory_mib * 1024**2
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
            try:
                read_as_stages_do(prepare(settings))
                code = ACCEPTED
            except ModelError as error:
                print(error, file=sys.stderr)
                code = REFUSED if len(str(error).splitlines()) == 1 else FAILED
            except BaseException:  # noqa: BLE001 - the parent sees the code
                traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(code)


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child, negative for a signal; None if it had to be killed."""
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def read_as_stages_do(folder: Path) -> None:
    """Read a prepared model: its config, every tensor's place, the layers after its pooling, and its tokenizer."""
    config = ModelConfig.load(folder)
    shapes = expected_shapes(config)
    found = set()
    for path in config.weight_paths(folder):
        file = TensorFile(path)
        for name, entry in file.entries.items():
            found.add(name)
            if name in shapes and format_key(name) not in file.metadata:
                assert entry.shape == shapes[name], name
    assert found >= set(shapes), set(shapes) - found
    PoolerHead.of(folder, config.pooler)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.padding is None and tokenizer.truncation is None
    tokenizer.encode("banana")
    with contextlib.suppress(UserError):  # an unknown decoder, which detokenize reports in one line
        Vocabulary.load(folder / "tokenizer.json")
    for name in ("chat_template.jinja", "chat_template.tool_use.jinja"):
        if (folder / name).exists():
            (folder / name).read_text(encoding="utf-8")


def keep(work: Path, target: Path) -> None:
    """Copy the model of a failed case. Of special files only the names are kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        work,
        target,
        symlinks=True,
        ignore=lambda parent, names: [name for name in names if (Path(parent) / name).is_fifo() or name == "cache"],
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
