"""Ray Serve deployments: the model server, and how its replicas are scaled."""
