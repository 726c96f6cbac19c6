"""Ray Train's controller of a run, as light as possible. From ``app`` it imports only two small modules.

Ray's own trainer has the controller import torch, and starts one actor for data, one for joining nodes and one for
leaving nodes. Each takes more CPU time to start than a worker takes to build a small model. So this module overrides
private methods of Ray Train V2.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ray
import ray.train
from ray.data._internal.cluster_autoscaler.base_autoscaling_coordinator import ReservedResources
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.metrics import Counter

from app.amounts import count_in
from app.cluster.coordinator_internals import exact, has_waiting_replicas

_PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
_LEAVE_TIMEOUT_S = 30.0
"""Maximum time that a worker takes to leave its process group before it is ended."""
_POLL_S = 1.0

_asked_to_yield = threading.Event()
"""Set in a worker that the controller has asked to yield."""


class LightTrainer(DataParallelTrainer):  # type: ignore[misc] # Ray has no types
    """Ray's trainer of PyTorch, for workers that join their process group and read their data themselves."""

    def __init__(self, train_worker: Any, worker_counts: Sequence[int], stays_on_nodes: bool, **options: Any) -> None:
        """``worker_counts`` are the allowed numbers of workers.

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
        fixed = SilentPolicy if self._stays_on_nodes else FixedPolicy
        policy = DividingPolicy if self.scaling_config.elasticity_enabled else fixed
        arguments["scaling_policy"] = policy(self.scaling_config, self._worker_counts)
        return super()._initialize_and_run_controller(**arguments)


class FailureCounter(ray.train.UserCallback):  # type: ignore[misc]
    """Counts how often the run's workers failed. Ray's controller, which lives on, exports the count."""

    def __init__(self, name: str, description: str, labels: dict[str, str]) -> None:
        self._name, self._description, self._labels = name, description, labels

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        """Called by Ray Train's controller, before it starts the workers again or gives up."""
        Counter(self._name, self._description, tuple(self._labels)).inc(1, self._labels)


class DividingPolicy(ElasticScalingPolicy):  # type: ignore[misc]
    """Ray's elastic policy, limited to numbers of workers that divide the global batch.

    Ray resizes a run by ending its workers, which loses the steps since the last checkpoint. This policy asks them to
    save their state and end. ``await_room`` then waits until other workers can go on.
    """

    def __init__(self, config: ray.train.ScalingConfig, worker_counts: Sequence[int]) -> None:
        super().__init__(config)
        self._worker_counts = worker_counts
        self._latest_monitor_time = float("-inf")
        self._needed = {kind: amount for kind, amount in config._resources_per_worker_not_none.items() if amount}
        self._claimed = replace(config, resources_per_worker=exact(self._needed))

    def _count_possible_workers(self, reserved_resources: ReservedResources) -> int:
        # Ray's own method divides floats, and would find only four times 0.1 in 0.5.
        possible = sum(map(self._count_on, reserved_resources.values())) if self._needed else self._worker_counts[-1]
        return max((count for count in self._worker_counts if count <= possible), default=0)

    def _count_on(self, reserved: Mapping[str, float]) -> int:
        """Return the number of workers that fit into what is reserved on a node."""
        return min(count_in(reserved.get(kind, 0.0), amount) for kind, amount in self._needed.items())

    def _send_resource_request(self) -> None:
        self._coordinator_client.send_resource_request(self._claimed, self._get_num_workers_for_resource_request())

    def _maybe_send_resource_request(self) -> None:
        number = self._get_num_workers_for_resource_request()
        self._coordinator_client.maybe_send_resource_request(self._claimed, number)

    def _get_reserved_resources(self) -> ReservedResources | None:
        reserved = super()._get_reserved_resources()
        if reserved is None:
            # The coordinator's node may be lost. A new client looks the coordinator up, and registers the run again.
            self._coordinator_client = TrainAutoscalingCoordinatorClient(self._requester_id)
        return reserved

    def make_decision_for_running_worker_group(
        self,
        worker_group_state: Any,
        worker_group_status: Any,  # noqa: ARG002
    ) -> ScalingDecision:
        """Ask the workers to yield if another number of them should run. Resize nothing."""
        self._maybe_send_resource_request()
        if self._is_due(worker_group_state.start_time) and self._should_yield(worker_group_state.num_workers):
            # One worker is enough, because workers exchange requests.
            worker_group_state.workers[0].execute_async(_note_request)
        return NoopDecision()

    def _is_due(self, started_s: float) -> bool:
        now_s = time.monotonic()
        if now_s - max(started_s, self._latest_monitor_time) < self.scaling_config.elastic_resize_monitor_interval_s:
            return False
        self._latest_monitor_time = now_s
        return True

    def _should_yield(self, num_workers: int) -> bool:
        """Return whether more or fewer workers should run, or none because replicas wait for room."""
        reserved = self._get_reserved_resources()
        if reserved is None:
            return False
        possible = self._count_possible_workers(reserved)
        return possible != num_workers and (possible > 0 or has_waiting_replicas())


class FixedPolicy(DividingPolicy):
    """A policy for a fixed number of workers, or none while replicas above training need their room."""

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start all workers, as Ray does: it waits for their resources."""
        self._maybe_send_resource_request()
        return self._get_resize_decision(self.scaling_config.max_workers)


class SilentPolicy(FixedPolicy):
    """The fixed policy for a cluster without an autoscaler. It registers the run only once replicas wait."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Keep the context for later. Do not start the coordinator's actor."""
        self._run_context = train_run_context

    def _maybe_send_resource_request(self) -> None:
        if self._coordinator_client is not None:
            super()._maybe_send_resource_request()

    def _should_yield(self, num_workers: int) -> bool:
        if self._coordinator_client is None:
            if not has_waiting_replicas():
                return False
            super().after_controller_start(self._run_context)
        return super()._should_yield(num_workers)


def await_room(
    config: ray.train.ScalingConfig, worker_counts: Sequence[int], run_name: str, is_asked: Callable[[], bool]
) -> bool:
    """Wait until there is room for the smallest number of workers. Return False if ``is_asked`` ends the wait."""
    policy = DividingPolicy(config, worker_counts)
    policy.after_controller_start(SimpleNamespace(run_id=run_name))
    try:
        while not isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision):
            if is_asked():
                return False
            time.sleep(_POLL_S)
    finally:
        policy.before_controller_abort()
    return True


def was_asked_to_yield() -> bool:
    """Return whether Ray Train's controller has asked this worker to save its state and end."""
    return _asked_to_yield.is_set()


def _note_request() -> None:
    """Note the controller's request, in a worker."""
    _asked_to_yield.set()


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
