"""The Open Inference Protocol v2, over HTTP and gRPC, with what Triton adds to it: bodies and messages, no server.

https://github.com/kserve/open-inference-protocol/tree/main/specification/protocol
https://github.com/triton-inference-server/server/tree/main/docs/protocol

``infer`` is what both say of an inference; ``rest`` and ``grpc`` read and write it, ``answer`` makes the answer.
``management`` is everything else that is asked of a server, ``natural`` what people ask.
"""
