"""How requests reach an endpoint: HTTP, gRPC, and who may ask."""
