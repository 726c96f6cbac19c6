"""Checkpoints: the state that a run resumes from, independent of the plan that wrote it."""
