"""`pipeline`, but execute.launcher = "ray" starts the agent of the executor on this machine, without Ray."""

import sys

from pipeline.__main__ import main
from pipeline.hosts import placement
from pipeline.runtime import topology

if __name__ == "__main__":
    topology.RAY_DRIVER = "pipeline.hosts.local_driver"
    placement.why_not_installed = lambda: None
    sys.exit(main())
