"""Code of the endpoint's replicas, kept for those that start after the deploying job has ended."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util import list_named_actors

_NAMESPACE = "keeps-code-of-the-endpoint"


@ray.remote(num_cpus=0, max_restarts=-1)
class _Keeper:
    """An actor that keeps a job's packages. Ray deletes them once no job or actor uses them."""


def keep_code(revision: str, environment: Mapping[str, Any]) -> None:
    """Keep the code of a revision of replicas. ``environment``: Ray options with their runtime environment."""
    options = {"name": revision, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    _Keeper.options(**options, **environment).remote()  # type: ignore[attr-defined]


def drop_code(kept: Collection[str]) -> None:
    """Let Ray delete the code of all revisions except ``kept``."""
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == _NAMESPACE and actor["name"] not in kept:
            with suppress(ValueError):  # another job has ended it
                ray.kill(ray.get_actor(actor["name"], _NAMESPACE))
