"""The space of the small model for reviews: that of ``tune_spaces.text`` without the keys that make it large."""

from optuna import Trial


def space(trial: Trial) -> None:
    """Rates and dropout; the model's size stays, so that every epoch costs the same."""
    trial.suggest_float("train.optimizer.lr", 1.0e-4, 3.0e-2, log=True)
    trial.suggest_float("train.schedule.warmup_fraction", 0.0, 0.2)
    trial.suggest_float("train.optimizer.weight_decay", 1.0e-3, 0.5, log=True)
    trial.suggest_float("model.args.dropout", 0.0, 0.5)
    trial.suggest_float("model.args.embedding_dropout", 0.0, 0.5)
    trial.suggest_float("model.args.token_dropout", 0.0, 0.3)
    trial.suggest_float("train.label_smoothing", 0.0, 0.2)
