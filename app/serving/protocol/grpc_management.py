"""Everything else over gRPC, from and to the values that HTTP says in JSON."""

from collections.abc import Sequence

from tritonclient.grpc import service_pb2 as pb

from app.errors import RequestError, short_repr
from app.serving.protocol.grpc import read_parameters
from app.serving.protocol.management import (
    IndexRequest,
    LoadRequest,
    ModelIndex,
    ModelMetadata,
    ServerMetadata,
    Statistics,
    UnloadRequest,
    check_fields,
)


def write_server_metadata(said: ServerMetadata) -> pb.ServerMetadataResponse:
    """The answer of ServerMetadata."""
    return pb.ServerMetadataResponse(**said.model_dump())


def write_model_metadata(said: ModelMetadata) -> pb.ModelMetadataResponse:
    """The answer of ModelMetadata."""
    return pb.ModelMetadataResponse(**said.model_dump())


def write_statistics(said: Statistics) -> pb.ModelStatisticsResponse:
    """The answer of ModelStatistics."""
    return pb.ModelStatisticsResponse(**said.model_dump())


def write_index(said: Sequence[ModelIndex]) -> pb.RepositoryIndexResponse:
    """The answer of RepositoryIndex."""
    return pb.RepositoryIndexResponse(models=[each.model_dump() for each in said])


def read_index(request: pb.RepositoryIndexRequest) -> IndexRequest:
    """Raises RequestError."""
    _check_repository(request.repository_name)
    return IndexRequest(ready=request.ready)


def read_load(request: pb.RepositoryModelLoadRequest) -> LoadRequest:
    """Raises RequestError."""
    _check_repository(request.repository_name)
    return check_fields(LoadRequest, {"parameters": read_parameters(request.parameters)})


def read_unload(request: pb.RepositoryModelUnloadRequest) -> UnloadRequest:
    """Raises RequestError."""
    _check_repository(request.repository_name)
    return check_fields(UnloadRequest, {"parameters": read_parameters(request.parameters)})


def _check_repository(name: str) -> None:
    if name:
        raise RequestError(f"the repository {short_repr(name)} cannot be chosen: there is one, leave its name out")
