"""The order of samples, and the micro-batches of one worker."""
