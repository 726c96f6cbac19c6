"""One served version of a model: batches to its engine, its health, and its shards on several processes."""
