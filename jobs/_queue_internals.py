"""The private parts of Ray that the queue of jobs uses (Ray 2.60): the GCS's key-value store and its table of jobs."""

from collections.abc import Iterator

import ray
from ray._private.worker import global_worker
from ray.experimental import internal_kv

_NAMESPACE = "rayloom_queue"
_TIMEOUT_S = 10.0


class Store:
    """Texts by key, shared by all jobs of the cluster. They survive a restart of a GCS that has persistent storage."""

    def put(self, key: str, text: str) -> None:
        """Write a text."""
        internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)

    def put_new(self, key: str, text: str) -> bool:
        """Write a text unless the key has one. Return whether it was written: of several processes, one succeeds."""
        return not internal_kv._internal_kv_put(key, text, overwrite=False, namespace=_NAMESPACE)

    def items(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the keys with this prefix, and their texts."""
        keys = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        # All in one call. With one for each key, some hundred waiting jobs would keep the GCS busy. A key that has just
        # been removed has no text.
        found = global_worker.gcs_client.internal_kv_multi_get(keys, _NAMESPACE.encode())
        for key, text in found.items():
            # What cannot be decoded is of another program: it must not end this one.
            yield key.decode(errors="replace"), text.decode(errors="replace")

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def driver_id() -> str:
    """Return the ids of this process and of its node. A node gets a new id when its cluster is started anew."""
    context = ray.get_runtime_context()
    return _driver_id(context.get_job_id(), context.get_node_id())


def living_drivers() -> set[str] | None:
    """Return the ids of the processes that have not ended, as the GCS knows them; None if it does not answer.

    The GCS needs no dashboard and no token of its API.
    """
    try:
        table = global_worker.gcs_client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_TIMEOUT_S
        )
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    except Exception:  # Ray raises errors of its own and of gRPC
        return None
    drivers = [
        (entry.job_id.hex(), entry.driver_address.node_id.hex()) for entry in table.values() if not entry.is_dead
    ]
    # If the GCS is lost together with a node, it may not have noted the end of the node's processes.
    living = {_driver_id(job, node) for job, node in drivers if node in nodes}
    # Without this process, it is not the table of this cluster.
    return living if driver_id() in living else None


def _driver_id(job: str, node: str) -> str:
    return f"{job}@{node}"
