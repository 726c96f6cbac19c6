"""Search spaces. A recipe names one in ``tune.space``. The names in a space are keys of the recipe."""

import optuna


def space(trial: optuna.Trial) -> None:
    """Draw the learning rate, the weight decay and the size of the model."""
    trial.suggest_float("train.optimizer.lr", 1.0e-3, 1.0e-1, log=True)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-4, 0.1, log=True)
    trial.suggest_int("model.args.width", 32, 128, step=32)
