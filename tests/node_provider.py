"""Node providers for Ray's autoscaler. A node's id is its address."""

import os
import subprocess
import sys
import threading
from abc import abstractmethod
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
"""Address of the head on loopback. Ray would replace 127.0.0.1 by the machine's address."""


class AddressedNodeProvider(NodeProvider):
    """Numbers its nodes: their addresses are those after the head's."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {}
        self._network, _, number = provider_config["head"].rpartition(".")
        self._last = int(number)
        self._add(provider_config["head"], {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head"})

    @abstractmethod
    def start(self, address: str, kind: str, options: list[str]) -> None:
        """Start a node of a type. ``options`` are those of ``ray start``."""

    @abstractmethod
    def end(self, address: str) -> None:
        """End a node."""

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
                self._last += 1
                node_id = f"{self._network}.{self._last}"
                self._add(node_id, tags)
            self.start(node_id, tags[TAG_RAY_USER_NODE_TYPE], node_config["options"])

    def terminate_node(self, node_id: str) -> None:
        with self._lock:
            del self._tags[node_id]
        self.end(node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    def _add(self, node_id: str, tags: dict[str, str]) -> None:
        self._tags[node_id] = {**tags, TAG_RAY_NODE_NAME: node_id, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}


def node_environment(address: str, kind: str) -> dict[str, str]:
    """Return the variables by which the autoscaler recognizes a node."""
    return {"RAY_CLOUD_INSTANCE_ID": address, "RAY_NODE_TYPE_NAME": kind}


class LoopbackNodeProvider(AddressedNodeProvider):
    """Starts raylets on this machine. The test kills them, by the mark that they inherit from the autoscaler."""

    def start(self, address: str, kind: str, options: list[str]) -> None:
        subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", f"--address={self.provider_config['gcs']}"),
                *(f"--node-ip-address={address}", f"--temp-dir={self.provider_config['folder']}/{address}"),
                *options,
            ],
            env={**os.environ, **node_environment(address, kind)},
            start_new_session=True,
        )

    def end(self, address: str) -> None:
        raise NotImplementedError("the test ends before a node is idle for long enough")


class FolderNodeProvider(AddressedNodeProvider):
    """Writes a file for each node that it wants. A watcher of the folder starts and ends the machines."""

    def start(self, address: str, kind: str, options: list[str]) -> None:
        self._file(address).write_text("\n".join([kind, *options]), encoding="utf-8")

    def end(self, address: str) -> None:
        self._file(address).unlink()

    def _file(self, address: str) -> Path:
        return Path(self.provider_config["folder"]) / address


def autoscaling(
    provider: type[AddressedNodeProvider], types: dict[str, Any], idle_timeout_s: float = 3600, **settings: str
) -> dict[str, Any]:
    """Return the autoscaler's configuration, with a head without CPUs.

    Args:
        types: the types of node, as Ray's configuration has them.
        settings: those of the provider. ``head`` is the head's address.
    """
    commands = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
    head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
    return {
        "cluster_name": "growing",
        "max_workers": sum(kind["max_workers"] for kind in types.values()),
        "idle_timeout_minutes": idle_timeout_s / 60,
        "provider": {
            "type": "external",
            "module": f"{provider.__module__}.{provider.__name__}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            **settings,
        },
        "available_node_types": {"head": head, **types},
        "head_node_type": "head",
        **{name: {} for name in ("auth", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", *commands)},
    }
