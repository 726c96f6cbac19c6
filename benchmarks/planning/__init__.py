"""How well the planner predicts: published runs, this machine's runs, and a fake world of ranks."""
