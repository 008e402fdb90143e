"""`python3 tools/gpu_check` and `python3 -m tools.gpu_check`."""

import sys
from pathlib import Path

if not __package__:
    # Running a folder puts it first on sys.path, and its modules would shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from tools.gpu_check.parent import main

if __name__ == "__main__":
    sys.exit(main())
