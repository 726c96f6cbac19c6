"""The code of the endpoint's replicas, for those that start on another node after the job that deployed them."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util import list_named_actors

_NAMESPACE = "keeps-code-of-the-endpoint"


@ray.remote(num_cpus=0, max_restarts=-1)
class _Keeper:
    """Ray deletes the packages of a job once neither the job nor an actor that has them is left."""


def keep_code(revision: str, environment: Mapping[str, Any]) -> None:
    """Keep the code of a revision of replicas. ``environment`` is their runtime environment as options of Ray."""
    options = {"name": revision, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    _Keeper.options(**options, **environment).remote()  # type: ignore[attr-defined]


def drop_code(kept: Collection[str]) -> None:
    """Let Ray delete the code of all but these revisions."""
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == _NAMESPACE and actor["name"] not in kept:
            with suppress(ValueError):  # another job was faster
                ray.kill(ray.get_actor(actor["name"], _NAMESPACE))
