"""The figures of a job that its RESULT line shows: those that a person wants to see, at most six."""

from collections.abc import Mapping
from typing import Any

FIGURES: dict[str, dict[str, str]] = {
    "prepare": {
        "data": "artifacts.data",
        "train_rows": "metrics.train_rows",
        "validation_rows": "metrics.validation_rows",
        "dropped": "metrics.dropped",
        "shards": "metrics.shards",
        "bytes": "metrics.bytes",
    },
    "train": {
        "val_accuracy": "metrics.val_accuracy",
        "val_loss": "metrics.val_loss",
        "val_perplexity": "metrics.val_perplexity",
        "epochs": "metrics.epochs",
        "samples_per_s": "metrics.samples_per_s",
        "verdict": "metrics.judgement.verdict",
    },
    "tune": {
        "best_value": "metrics.best_value",
        "best_trial": "metrics.best_trial",
        "trials": "metrics.trials",
        "trials_pruned": "metrics.trials_pruned",
        "trials_failed": "metrics.trials_failed",
        "epochs_trained": "metrics.epochs_trained",
    },
    "compile": {
        "model": "artifacts.model",
        "engine": "metrics.chosen.engine",
        "precision": "metrics.chosen.precision",
        "score": "metrics.accuracy.score.value",
        "latency_ms": "metrics.point.latency_ms",
        "verdict": "metrics.accuracy.judgement.verdict",
    },
    "deploy": {
        "model": "artifacts.model",
        "http": "artifacts.http",
        "grpc": "artifacts.grpc",
        "replicas": "metrics.replicas",
        "ready_s": "metrics.ready_s",
    },
    "undeploy": {"models": "metrics.models"},
    "plan": {
        "plan": "metrics.plan.plan",
        "step_s": "metrics.plan.step_s",
        "num_fitting": "metrics.num_fitting",
        "fewest_devices": "metrics.fewest_devices",
    },
    "lifecycle": {
        "verdict": "metrics.train.judgement.verdict",
        "score": "metrics.compile.accuracy.score.value",
        "precision": "metrics.compile.chosen.precision",
        "latency_ms": "metrics.compile.point.latency_ms",
        "model": "artifacts.model",
        "http": "artifacts.http",
    },
}
"""For each job, where in ``result.json`` its figures stand."""


def figures_of(job: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a job's ``result.json``; those that it lacks are left out, as of a job that was stopped."""
    found = {name: _find(result, path.split(".")) for name, path in FIGURES.get(job, {}).items()}
    if job == "train":
        metrics = result.get("metrics") or {}
        others = [name for name in metrics if name.startswith("val_") and name not in found]
        found = {name: metrics[name] for name in others[:2]} | found
    return {name: _rounded(value) for name, value in found.items() if value is not None}


def _find(tree: Any, path: list[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _rounded(value: Any) -> Any:
    """Round a number to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
