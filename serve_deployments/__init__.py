"""Ray Serve deployments: the model server, and the scaling of its replicas."""
