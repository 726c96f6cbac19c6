"""Small convolutional networks for images, such as ``recipes/digits.yaml`` and ``recipes/fashion.yaml``."""

from optuna import Trial


def rates(trial: Trial) -> None:
    """AdamW's rates for a network of fixed size. Every epoch costs the same.

    - ``lr``: below 3e-4 a few epochs are not enough. Near 3e-2 the steps are too large for any width.
    - ``weight_decay``: decoupled from the rate, so 0.1 is still mild.
    - ``warmup_fraction``: with a high rate, the first steps can destroy the initial weights.
    - ``label_smoothing``: up to 0.2. More blurs ten classes.
    """
    trial.suggest_float("train.optimizer.lr", 3.0e-4, 3.0e-2, log=True)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-4, 0.1, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)


def augmentation(trial: Trial) -> None:
    """``rates``, and how much training images are changed. More epochs than usual pay for stronger changes.

    - ``crop``: the smallest part of the area that is cut out. Below 0.4 a small image loses its object.
    - ``flip``: mirror half of the images, or none, as for digits, where left and right matter.
    - ``color``: brightness, contrast and saturation, by up to 40 %.
    - ``mixup``: alpha of its Beta distribution. 0.2 mixes a little, and 1.0 evenly.
    - ``mix.share``: from no mixed image to all.
    """
    rates(trial)
    trial.suggest_float("train.augment.image.crop", 0.4, 1.0)
    trial.suggest_categorical("train.augment.image.flip", [0.0, 0.5])
    trial.suggest_float("train.augment.image.color", 0.0, 0.4)
    trial.suggest_float("train.augment.mix.mixup", 0.1, 1.0, log=True)
    trial.suggest_float("train.augment.mix.share", 0.0, 1.0)


def space(trial: Trial) -> None:
    """The optimizer, which matters most, and the width of the network.

    - ``lr``: nearly four orders of magnitude, on a logarithmic scale, because its ratio matters. AdamW divides by the
      gradient's size and needs the lower end, SGD the upper one.
    - ``momentum``: only for SGD. 0.8 to 0.99 averages over the last 5 to 100 gradients. Without momentum, SGD is too
      slow for so few epochs.
    - ``weight_decay``: from almost none to one that affects a small network.
    - ``width``: multiples of 8, which group norm needs. 64 costs about ten times as much as 16.
    - ``warmup_fraction``: with a high rate, the first steps can destroy the initial weights.
    - ``label_smoothing``: up to 0.2. More blurs ten classes.
    """
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 0.5, log=True)
    if trial.suggest_categorical("train.optimizer.name", ["adamw", "sgd"]) == "sgd":
        trial.suggest_float("train.optimizer.momentum", 0.8, 0.99)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-5, 0.1, log=True)
    trial.suggest_int("model.args.width", 16, 64, step=8)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)
