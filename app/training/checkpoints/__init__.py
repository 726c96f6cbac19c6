"""Checkpoints: what a run needs to go on, independent of the plan it was written under."""
