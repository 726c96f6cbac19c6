"""The transport of an endpoint's requests: HTTP and gRPC."""
