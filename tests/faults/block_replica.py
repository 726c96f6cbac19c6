"""Block the event loop of a replica of the endpoint, as a job: python -m tests.faults.block_replica SECONDS

It prints the replica's process id, and when it was blocked, in seconds since 1970.
"""

import os
import sys
import time

import ray


def main(seconds: float) -> None:
    ray.init()
    named = ray.util.list_named_actors(all_namespaces=True)
    name = next(item["name"] for item in named if item["name"].startswith("SERVE_REPLICA::rayloom#ModelServer#"))
    replica = ray.get_actor(name, "serve")
    pid = ray.get(replica.__ray_call__.remote(lambda _: os.getpid()))
    print("BLOCKED", pid, time.time(), flush=True)
    ray.wait([replica.__ray_call__.remote(lambda _: time.sleep(seconds))], timeout=1.0)  # let it begin


if __name__ == "__main__":
    main(float(sys.argv[1]))
