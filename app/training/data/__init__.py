"""From a split to the micro-batches of one worker."""
