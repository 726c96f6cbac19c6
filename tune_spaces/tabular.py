"""Perceptrons for rows of a table, such as ``recipes/diabetes.yaml`` and ``recipes/breast_cancer.yaml``."""

from optuna import Trial


def space(trial: Trial) -> None:
    """The optimizer's rates, and the size of the network.

    - ``lr``: two orders of magnitude, on a logarithmic scale, because its ratio matters.
    - ``weight_decay``: tables are small, so decay up to 1 can help.
    - ``width`` and ``layers``: from almost linear to about 20,000 parameters.
    - ``dropout``: up to a third of the hidden units.
    """
    trial.suggest_float("train.optimizer.lr", 3.0e-4, 3.0e-2, log=True)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-3, 1.0, log=True)
    trial.suggest_int("model.args.width", 8, 128, step=8)
    trial.suggest_int("model.args.layers", 1, 3)
    trial.suggest_float("model.args.dropout", 0.0, 0.3)
