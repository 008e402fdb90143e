"""`python3 tools/compare_peers` and `python3 -m tools.compare_peers`."""

import sys
from pathlib import Path

if not __package__:
    # Running a folder puts it first on sys.path, and its modules would shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from tools.compare_peers.parent import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
