"""Ray Train's controller of a run, as light as the run allows. It imports no other module of this library.

Ray's own trainer has the controller import torch, and starts one actor for data, one for joining nodes and one for
leaving nodes. Each takes more CPU time to start than a worker takes to build a small model. So this module overrides
private methods of Ray Train V2.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.metrics import Counter

_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
_LEAVE_TIMEOUT_S = 30.0
"""Maximum time that a worker takes to leave its process group before it is ended."""


class LightTrainer(DataParallelTrainer):  # type: ignore[misc] # Ray has no types
    """Ray's trainer of PyTorch, for workers that join their process group and read their data themselves."""

    def __init__(self, train_worker: Any, worker_counts: Sequence[int], stays_on_nodes: bool, **options: Any) -> None:
        """``worker_counts`` are the allowed numbers of workers, if the recipe gives a range.

        ``stays_on_nodes``: no node joins or leaves during the run, so nothing has to watch for that.
        """
        super().__init__(train_worker, backend_config=EnvironmentConfig(), **options)
        self._worker_counts, self._stays_on_nodes = worker_counts, stays_on_nodes

    def _create_default_callbacks(self) -> list[Any]:
        # That callback starts an actor for datasets, and the workers read their data themselves.
        return [
            callback for callback in super()._create_default_callbacks() if not isinstance(callback, DatasetsCallback)
        ]

    def _initialize_and_run_controller(self, **arguments: Any) -> ray.train.Result:
        # The controller inherits the variable.
        os.environ[_PREEMPTION_WATCHER] = str(int(not self._stays_on_nodes))
        if self.scaling_config.elasticity_enabled:
            arguments["scaling_policy"] = DividingPolicy(self.scaling_config, self._worker_counts)
        elif self._stays_on_nodes:
            arguments["scaling_policy"] = SilentPolicy(self.scaling_config)
        return super()._initialize_and_run_controller(**arguments)


class FailureCounter(ray.train.UserCallback):  # type: ignore[misc]
    """Counts how often the run's workers failed. Ray's controller, which lives on, exports the count."""

    def __init__(self, name: str, description: str, labels: dict[str, str]) -> None:
        self._name, self._description, self._labels = name, description, labels

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Called by Ray Train's controller, before it starts the workers again or gives up."""
        Counter(self._name, self._description, tuple(self._labels)).inc(1, self._labels)


class DividingPolicy(ElasticScalingPolicy):  # type: ignore[misc]
    """Ray's elastic policy, limited to numbers of workers that divide the global batch."""

    def __init__(self, config: ray.train.ScalingConfig, worker_counts: Sequence[int]) -> None:
        super().__init__(config)
        self._worker_counts = worker_counts

    def _count_possible_workers(self, reserved_resources: ReservedResources) -> int:
        possible = super()._count_possible_workers(reserved_resources)
        return max((count for count in self._worker_counts if count <= possible), default=0)


class SilentPolicy(FixedScalingPolicy):  # type: ignore[misc]
    """Ray's policy for a fixed number of workers, on a cluster that has no autoscaler to ask for nodes."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start no actor that would ask."""

    def _maybe_send_resource_request(self) -> None:
        """Ask for nothing."""


@dataclass
class EnvironmentConfig(BackendConfig):  # type: ignore[misc]
    """Gives each worker its rank in environment variables, as torchrun does."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the backend's class, for Ray Train's controller."""
        return EnvironmentBackend


class EnvironmentBackend(Backend):  # type: ignore[misc]
    """Gives the workers their ranks and the address to meet. Each imports torch and joins when it trains."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
        """Set the environment of the workers. Ray Train's controller calls this after they have started."""
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_set_environment, address, port)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
        """Have the workers leave their process group. Ray Train's controller calls this before they end."""
        try:
            ray.get(worker_group.execute_async(_leave_process_group), timeout=_LEAVE_TIMEOUT_S)
        except (GetTimeoutError, RayActorError):
            return  # they are ended anyway, or have died


def _set_environment(address: str, port: int) -> None:
    """Set the environment variables that ``torch.distributed`` and DeepSpeed read."""
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }


def _leave_process_group() -> None:
    from app.training.worker import leave_process_group  # the worker has already imported it

    leave_process_group()
