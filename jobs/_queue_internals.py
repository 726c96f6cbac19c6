"""The private parts of Ray that the queue of jobs uses (Ray 2.60): its GCS's key-value store, a job's metadata."""

import json
import os
from collections.abc import Iterator

from ray.experimental import internal_kv

_NAMESPACE = "rayloom_queue"


class Store:
    """Texts by key, which all jobs of the cluster see. A GCS that keeps a store of its own keeps them, too."""

    def put(self, key: str, text: str) -> None:
        """Write a text."""
        internal_kv._internal_kv_put(key, text, namespace=_NAMESPACE)

    def put_new(self, key: str, text: str) -> bool:
        """Write a text unless the key has one. Return whether it was written; of several processes, one writes."""
        return not internal_kv._internal_kv_put(key, text, overwrite=False, namespace=_NAMESPACE)

    def items(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the keys that begin so, with their texts."""
        for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE):
            text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if text is not None:  # else it has just been removed
                yield key.decode(), text.decode()

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def job_metadata() -> dict[str, str]:
    """Return the metadata with which this process's job was submitted; none if it was started by hand.

    Ray's context of a driver has only ids.
    """
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    metadata: dict[str, str] | None = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("metadata")
    return metadata or {}
