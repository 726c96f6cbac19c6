"""Pages of runs: ``report.html`` of training, of a deployment and of a lifecycle."""
