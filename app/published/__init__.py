"""What was published, in memory and ready to be used: the weights of a run, and the versions of a model."""
