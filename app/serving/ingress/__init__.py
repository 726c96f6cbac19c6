"""HAProxy in front of the replicas, as Ray Serve starts it."""
