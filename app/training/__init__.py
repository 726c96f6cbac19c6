"""The training run: plan, DeepSpeed engine, loop, checkpoints and weights; with Ray or without."""
