"""What watching costs: CPU of a request and of a training step, with monitoring on and off in turn."""
