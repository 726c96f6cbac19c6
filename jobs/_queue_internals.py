"""The private parts of Ray that the queue of jobs uses (Ray 2.60): the GCS's key-value store and a job's metadata."""

import json
import os
from collections.abc import Iterator

from ray.experimental import internal_kv

_NAMESPACE = "rayloom_queue"


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
        for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE):
            text = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if text is not None:  # else it has just been removed
                yield key.decode(), text.decode()

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def job_metadata() -> dict[str, str]:
    """Return the metadata of this process's job; empty if the process was started by hand.

    Ray's runtime context of a driver has only ids.
    """
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    metadata: dict[str, str] | None = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("metadata")
    return metadata or {}
