"""Run a Ray cluster of three nodes with one CPU each, and print its address, raylets and log folder as JSON.

The cluster ends with its standard input or its parent process.
"""

import json
import os
import sys

from tinkerflow.backend.supervise.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(**node) for _ in range(2))]
    cluster.wait_for_nodes()
    raylets = [one.all_processes["raylet"][0].process.pid for one in nodes]
    print(
        json.dumps({"address": cluster.address, "raylets": raylets, "logs": nodes[0].get_logs_dir_path()}), flush=True
    )
    sys.stdin.read()
    cluster.shutdown()
