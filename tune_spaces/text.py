"""Small Transformers for texts, such as ``recipes/reviews.yaml``."""

from optuna import Trial


def regularization(trial: Trial) -> None:
    """The learning rate, and the regularization of a model that overfits small data. Every epoch costs the same.

    - ``lr``: below 1e-4 a Transformer from scratch learns nothing in a few epochs. Near 1e-2 AdamW diverges.
    - ``warmup_fraction``: a high first rate destroys attention. More than a fifth of the run does not pay.
    - ``weight_decay``: AdamW's, decoupled from the rate, so 0.5 is still mild.
    - ``dropout``, ``embedding_dropout``: up to one half.
    - ``token_dropout``: a text loses its meaning if more than a third of its tokens are hidden.
    """
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 1.0e-2, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-3, 0.5, log=True)
    trial.suggest_float("model.args.dropout", 0.0, 0.5)
    trial.suggest_float("model.args.embedding_dropout", 0.0, 0.5)
    trial.suggest_float("model.args.token_dropout", 0.0, 0.3)


def rates(trial: Trial) -> None:
    """``regularization`` of a classifier.

    - ``label_smoothing``: reviews are labelled by their stars, some of them wrongly.
    """
    regularization(trial)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)


def space(trial: Trial) -> None:
    """``rates``, and the model's size."""
    rates(trial)
    _size(trial)


def unsmoothed_space(trial: Trial) -> None:
    """``regularization``, and the model's size, for numbers and sets of labels, which have no label smoothing."""
    regularization(trial)
    _size(trial)


def _size(trial: Trial) -> None:
    """The sizes for small data. The width is a multiple of the four heads."""
    trial.suggest_int("model.args.width", 64, 192, step=32)
    trial.suggest_int("model.args.layers", 1, 3)
