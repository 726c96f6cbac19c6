"""Models that start from others: fine-tuning beside its peers, and distillation."""
