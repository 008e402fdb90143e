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
import traceback
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
from tools.fuzzing.cases import arguments, run_cases, wait  # noqa: E402

ACCEPTED, REFUSED, FAILED = 0, 3, 1
"""Exit codes of a case's process."""
QUANTIZATIONS: tuple[PreparedFormat, ...] = ("auto", "auto", "none", "q8_0", "q4_1")


def main() -> int:
    args = arguments(__doc__, memory_mib=512, timeout_s=60.0)
    with tempfile.TemporaryDirectory() as folder:
        originals = Path(folder) / "originals"
        originals.mkdir()
        built = models.build(originals)
        work = Path(folder) / "work"
        for model in built:  # the unmodified models are accepted; this also imports everything before the first fork
            prepared = prepare(Settings(model=str(model), cache_dir=str(Path(folder) / "cache")))
            read_as_stages_do(prepared)

        def keep_case(number: int, target: Path) -> None:
            shutil.rmtree(target, ignore_errors=True)
            keep(work, target)

        return run_cases(args, lambda number: run_case(number, args, built, work), keep_case, report_every=500)


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
