"""The plan of a training: what ``auto`` chooses, what a recipe is predicted to take, and what this machine measures."""
