"""A Ray cluster for tests, in a process of its own: nodes are raylets on this machine.

    python cluster.py 1 2     a head with 1 CPU, and a node with 2: prints the address, then the raylets' pids by node

Then each line of its standard input is an order: `add CPUS` starts another node and prints its raylet's pid. At the end
of its input, the cluster ends."""

import os
import sys
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 1024**2


def pid_of(node: Any) -> int:
    """The process of a node's raylet."""
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def main(cpus: list[str]) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints what it likes
    head, *others = (int(one) for one in cpus)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": head, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=one, object_store_memory=STORE_BYTES) for one in others)]
    print(cluster.address, *map(pid_of, nodes), file=out)
    for line in sys.stdin:
        match line.split():
            case ["add", num]:
                print(pid_of(cluster.add_node(num_cpus=int(num), object_store_memory=STORE_BYTES)), file=out)
            case _:
                raise SystemExit(f"no such order: {line}")
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
