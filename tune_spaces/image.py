"""Small convolutional networks for images, such as ``recipes/digits.yaml`` and ``recipes/fashion.yaml``."""

from optuna import Trial


def rates(trial: Trial) -> None:
    """What AdamW is told, for a network whose size is settled: every epoch costs the same.

    - ``lr``: below 3e-4 a few epochs do not suffice; near 3e-2 the steps are too long for a network of any width.
    - ``weight_decay``: decoupled from the rate, so 0.1 is still a mild pull.
    - ``warmup_fraction``: with a high rate the first steps can destroy what the initial weights are good for.
    - ``label_smoothing``: none, or up to 0.2; more blurs ten classes.
    """
    trial.suggest_float("train.optimizer.lr", 3.0e-4, 3.0e-2, log=True)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-4, 0.1, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)


def space(trial: Trial) -> None:
    """The optimizer first, for it decides most; then the size of the network.

    - ``lr``: nearly four orders of magnitude, on a logarithmic scale, for what counts is its ratio. AdamW, which
      divides by the gradient's size, wants the lower end, SGD the upper one.
    - ``momentum``: of SGD alone. 0.8 to 0.99 averages over the last 5 to 100 gradients; without it SGD is not in
      the race within so few epochs.
    - ``weight_decay``: from next to none to one that a small network feels.
    - ``width``: multiples of 8, which group norm needs; 64 costs about ten times what 16 does.
    - ``warmup_fraction``: with a high rate the first steps can destroy what the initial weights are good for.
    - ``label_smoothing``: none, or up to 0.2; more blurs ten classes.
    """
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 0.5, log=True)
    if trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd":
        trial.suggest_float("train.optimizer.momentum", 0.8, 0.99)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-5, 0.1, log=True)
    trial.suggest_int("model.args.width", 16, 64, step=8)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)
