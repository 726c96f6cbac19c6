"""How requests reach an endpoint: HTTP and gRPC."""
