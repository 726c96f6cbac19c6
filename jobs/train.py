"""Train a recipe's model on the Ray cluster: python -m jobs.train RECIPE [key=value …]"""

import sys
from pathlib import PurePath

import ray.train
from ray.train.torch import TorchTrainer
from upath import UPath

from app.config import TrainConfig
from app.errors import TrainingError
from app.runs import Outcome, Run
from app.training.ray_worker import WorkerArguments, train_worker
from app.training.records import EpochRecord, best_of
from app.training.run import finish_run, prepare_run
from app.training.run_folder import CHECKPOINTS, DATA
from jobs._cluster import connect, require
from jobs._runner import main


def train(run: Run) -> Outcome:
    """Check everything, train on the cluster, keep the best weights."""
    config = run.recipe.train
    data = prepare_run(run)
    connect()
    require(_resources(config, config.workers), f"train.workers, of which there are {config.workers},")
    run.open()
    data.save(run.folder / DATA)
    result = _fit(run)
    best, checkpoint = _best(result, run)
    return finish_run(run, data, best, EpochRecord.model_validate(result.return_value[-1]), checkpoint)


def _fit(run: Run) -> ray.train.Result:
    config = run.recipe.train
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=WorkerArguments(recipe=run.recipe.model_dump_json(), run_folder=str(run.folder)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.workers,
            use_gpu=config.device == "gpu",
            resources_per_worker=_resources(config, workers=1),
        ),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
            storage_path=str(run.folder),
            failure_config=ray.train.FailureConfig(max_failures=config.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=1,
                checkpoint_score_attribute=config.selection.metric,
                checkpoint_score_order=config.selection.mode,
            ),
        ),
    )
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise TrainingError(f"training failed: {_cause(error)}") from error


def _resources(config: TrainConfig, workers: int) -> dict[str, float]:
    """What Ray reserves for so many workers."""
    gpus = {"GPU": 1.0 * workers} if config.device == "gpu" else {}
    return {"CPU": config.cpus_per_worker * workers, **gpus}


def _best(result: ray.train.Result, run: Run) -> tuple[EpochRecord, UPath]:
    """The best epoch whose checkpoint Ray has kept, which chooses for itself among equals, and the checkpoint."""
    kept = {metrics["epoch"]: (EpochRecord.model_validate(metrics), path) for path, metrics in result.best_checkpoints}
    best = best_of([record for record, _ in kept.values()], run.recipe.train)
    # Of a path on an object store, Ray leaves the protocol out: only the name is taken.
    return best, run.folder / CHECKPOINTS / PurePath(kept[best.epoch][1].path).name


def _cause(error: ray.train.TrainingFailedError) -> str:
    """The first worker's own error, without the traceback that Ray puts around it."""
    failures = getattr(error, "worker_failures", None)
    return str(failures[min(failures)] if failures else error).strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main("train", train))
