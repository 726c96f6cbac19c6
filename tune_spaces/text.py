"""Small Transformers for texts, such as ``recipes/reviews.yaml``."""

from optuna import Trial


def rates(trial: Trial) -> None:
    """The learning rate, then what holds back a model that learns small data by heart; every epoch costs the same.

    - ``lr``: a Transformer from scratch learns nothing below 1e-4 in a few epochs, and AdamW breaks it near 1e-2.
    - ``warmup_fraction``: attention is what a high first rate destroys; a fifth of the run is the most that pays.
    - ``weight_decay``: AdamW's, decoupled from the rate, so 0.5 is still a mild pull.
    - ``dropout``, ``embedding_dropout``, ``token_dropout``: the first two up to one half; a text of which more than
      a third of the tokens are hidden loses what it says.
    - ``label_smoothing``: reviews are labelled by their stars, some of them wrongly.
    """
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 1.0e-2, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-3, 0.5, log=True)
    trial.suggest_float("model.args.dropout", 0.0, 0.5)
    trial.suggest_float("model.args.embedding_dropout", 0.0, 0.5)
    trial.suggest_float("model.args.token_dropout", 0.0, 0.3)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)


def space(trial: Trial) -> None:
    """``rates``, and the model's size.

    - ``width``, ``layers``: what small data fills; the width is a multiple of the four heads.
    """
    rates(trial)
    trial.suggest_int("model.args.width", 64, 192, step=32)
    trial.suggest_int("model.args.layers", 1, 3)
