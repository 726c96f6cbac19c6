"""Ray Serve deployments: the model server."""
