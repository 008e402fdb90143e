"""Prepares models in processes of their own, each with another environment.

huggingface_hub reads its environment variables when it is imported, so each preparation needs a new process. They are
forks of a server that has imported torch, which takes much longer than a preparation.
"""

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.stages.prepare import progress
from pipeline.stages.prepare.stage import prepare

TIMEOUT_S = 120.0
PRELOADED = ("torch", "tokenizers", "safetensors.torch", __name__)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


def run(model: str, cache: Path, environment: Mapping[str, str], output: Path) -> "subprocess.CompletedProcess[str]":
    """Prepare a model. The exit code is 1 after a UserError; stdout has the folder, stderr progress and the error.
    `output` is a folder for both."""
    process = _context.Process(target=_prepare, args=(model, str(cache), dict(environment), str(output)))
    process.start()
    try:
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, f"preparing {model} took more than {TIMEOUT_S:.0f} s"
    finally:
        process.kill()
        process.join()
        code = process.exitcode
        process.close()
    assert code is not None
    return subprocess.CompletedProcess(model, code, *((output / name).read_text() for name in ("stdout", "stderr")))


def _prepare(model: str, cache: str, environment: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    assert "huggingface_hub" not in sys.modules
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    warnings.simplefilter("error", DeprecationWarning)
    try:
        print(prepare(Settings(model=model, cache_dir=cache), progress.for_stream()))
    except UserError as error:
        sys.exit(f"error: {error}")
    finally:
        Path(output, "modules").write_text("\n".join(sys.modules))
