"""`pipeline pull`: downloads a model before a server needs it."""

import importlib
import sys

from pipeline.cli.complain import complain
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.log.printable import printable

PULL = "pipeline.stages.prepare.pull"
PROGRESS = "pipeline.stages.prepare.progress"
FAILED, INTERRUPTED = 1, 130


def run(settings: Settings) -> int:
    """Returns 1 if the model can't be downloaded, 130 after Ctrl-C."""
    progress = importlib.import_module(PROGRESS).for_stream()
    try:
        line: str = importlib.import_module(PULL).pull(settings, progress)
    except UserError as error:
        complain("pipeline pull", error)
        return FAILED
    except KeyboardInterrupt:
        print("\npipeline pull: interrupted; the next pull goes on where this one ended", file=sys.stderr)
        return INTERRUPTED
    print(printable(line))
    return 0
