"""Streams of NATS and Kafka: read by offset, cut into micro-epochs, and written as shards."""
