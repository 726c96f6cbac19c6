"""The planner: the parallel plan of a model on a cluster, with its time, memory and traffic, before anyone pays."""
