"""Decoders that predict the next token, such as ``recipes/stdlib_gpt.yaml``."""

from optuna import Trial


def space(trial: Trial) -> None:
    """The optimizer and the batch size. The model's size is fixed, because larger ones are nearly always better.

    - ``lr``: small models tolerate rates ten times those of large ones. Below 3e-4 a few epochs are not enough, and
      above 2e-2 AdamW diverges.
    - ``warmup_fraction``: Adam's averages need some hundred steps before a high rate is safe. More than a fifth of so
      short a run is lost to low rates.
    - ``weight_decay``: AdamW's, decoupled from the rate. 0.1 is common, so the range is logarithmic around it.
    - ``betas.1``: the decay of the squared gradient's average. 0.9 averages over 10 steps and 0.99 over a hundred. The
      default for classifiers, 0.999, averages over longer than a short run's rate stays the same.
    - ``global_batch_size``: in blocks. Halving it doubles the steps of an epoch, and the noise in each step.
    """
    trial.suggest_float("train.optimizer.lr", 3.0e-4, 2.0e-2, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-2, 0.5, log=True)
    trial.suggest_float("train.optimizer.betas.1", 0.9, 0.99)
    trial.suggest_categorical("train.global_batch_size", [16, 32, 64])
