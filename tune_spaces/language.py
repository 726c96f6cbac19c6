"""Decoders that predict the next token, such as ``recipes/stdlib_gpt.yaml``."""

from optuna import Trial


def space(trial: Trial) -> None:
    """How fast it learns; the size of the model stays, for a larger one is nearly always better and slower.

    - ``lr``: small models bear rates ten times those of large ones; below 3e-4 a few epochs do not get far, and above
      2e-2 AdamW breaks.
    - ``warmup_fraction``: Adam's averages need some hundred steps before they can be trusted at a high rate; more than
      a fifth of so short a run is lost to low rates.
    - ``weight_decay``: AdamW's, decoupled from the rate; 0.1 is the habit, on a logarithmic scale around it.
    - ``betas.1``: of the gradient's square. 0.9 remembers 10 steps and 0.99 a hundred; the default for classifiers,
      0.999, remembers longer than a short run's rate stays the same.
    - ``global_batch_size``: blocks. Every halving doubles the steps of an epoch, and the noise in each of them.
    """
    trial.suggest_float("train.optimizer.lr", 3.0e-4, 2.0e-2, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-2, 0.5, log=True)
    trial.suggest_float("train.optimizer.betas.1", 0.9, 0.99)
    trial.suggest_categorical("train.global_batch_size", [16, 32, 64])
