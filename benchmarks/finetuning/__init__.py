"""Models that start from others: distillation of the reviews' model into a small one."""
