"""The Open Inference Protocol v2 with Triton's extensions, over HTTP and gRPC: bodies and messages, without a server.

https://github.com/kserve/open-inference-protocol/tree/main/specification/protocol
https://github.com/triton-inference-server/server/tree/main/docs/protocol

``infer`` has the requests and responses of an inference. ``rest`` and ``grpc`` read and write them. ``management`` has
all other requests to a server, and ``predict`` those of people.
"""
