"""A node provider for Ray's autoscaler. Its nodes are raylets on this machine, each with its own loopback address."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

HEAD = "127.0.0.2"
"""Address and id of the head: every node's id is its address. Ray would replace 127.0.0.1 by the machine's address."""


class LoopbackNodeProvider(NodeProvider):
    """Starts nodes with ``ray start``. The test kills them, by the mark that they inherit from the autoscaler."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {}
        self._add(HEAD, {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head"})

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self._lock:
            return [node_id for node_id, tags in self._tags.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._tags

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._tags

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        with self._lock:
            self._tags[node_id].update(tags)

    def internal_ip(self, node_id: str) -> str:
        return node_id

    def external_ip(self, node_id: str) -> str:
        return node_id

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            with self._lock:
                node_id = f"127.0.0.{len(self._tags) + 2}"
                self._add(node_id, tags)
            autoscaler = {"RAY_CLOUD_INSTANCE_ID": node_id, "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE]}
            subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name("ray")), "start", f"--address={self.provider_config['gcs']}"),
                    *(f"--node-ip-address={node_id}", f"--temp-dir={self.provider_config['folder']}/{node_id}"),
                    *node_config["options"],
                ],
                env={**os.environ, **autoscaler},
                start_new_session=True,
            )

    def terminate_node(self, node_id: str) -> None:
        raise NotImplementedError("the test ends before a node is idle for long enough")

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    def _add(self, node_id: str, tags: dict[str, str]) -> None:
        self._tags[node_id] = {**tags, TAG_RAY_NODE_NAME: node_id, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}
