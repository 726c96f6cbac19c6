"""torchrun -m tests.faults.split_runs FOLDER CORPUS: every plan's 20 steps in one go, and stopped on the way.

Each run's folder is FOLDER/PLAN/STOPS, such as ``ZeRO 3/7+13``. With a STEP after CORPUS, only the plans that are
``ANEW`` go on, to this step, in FOLDER/PLAN/``SPLIT_ANEW``: so that each part is of other processes.
"""

import os
import sys
import warnings

import torch
from upath import UPath

from app.config import Recipe, TrainConfig, load_recipe
from app.tasks import prepare
from app.training.plan import TrainingPlan
from app.training.session import train
from app.training.worker import leave_process_group, start_worker

STEPS = 20
PLANS = {  # pipelines last: DeepSpeed remembers their grid for the rest of the process
    **{f"ZeRO {stage}": f"{{zero_stage: {stage}}}" for stage in range(4)},
    "tensor 2": "{tensor: 2}",
    "pipeline 2": "{pipeline: 2, micro_batch: 8}",
}
ANEW, SPLIT_ANEW = ("ZeRO 3", "pipeline 2"), "7+13, anew"
SPLITS = {"20": [], "7+13": [7], "7+6+7": [7, 13]}
RUN = ["data.block_length=32", "data.tokenizer={kind: bytes}", f"train.max_steps={STEPS}", "train.precision=fp32",
       "model.args={layers: 2, width: 32, heads: 2, dropout: 0.1}", "train.checkpoint.every_steps=1",
       "train.deepspeed={zero_optimization: {stage3_param_persistence_threshold: 0}}"]  # fmt: skip


def recipe_of(corpus: str, plan: str, stop: int | None) -> Recipe:
    """Of a run that an alert stops after step ``stop``: what it asks at one step ends the run at the next."""
    rules = [f"alerts=[{{metric: step, above: {stop - 2}, do: [stop]}}]"] if stop else []
    overrides = [f"data.source={corpus}", f"train.plan={PLANS[plan]}", f"train.workers={os.environ['WORLD_SIZE']}"]
    return load_recipe("recipes/stdlib_gpt.yaml", [*RUN, *overrides, *rules])


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    worker, folder, corpus = start_worker(TrainConfig()), UPath(sys.argv[1]), sys.argv[2]
    data = prepare(recipe_of(corpus, "ZeRO 0", None))

    def go(plan: str, split: str, stop: int | None) -> None:
        run = folder / plan / split
        run.mkdir(parents=True, exist_ok=True)
        ending = train(TrainingPlan.of(recipe_of(corpus, plan, stop), data), data, worker, run)
        assert ending.step == (stop or STEPS), ending

    if anew := [int(step) for step in sys.argv[3:]]:
        for plan in ANEW:
            go(plan, SPLIT_ANEW, None if anew == [STEPS] else anew[0])
    else:
        for plan in PLANS:
            for split, stops in SPLITS.items():
                for stop in [*stops, None]:
                    go(plan, split, stop)
    leave_process_group()


if __name__ == "__main__":
    main()
