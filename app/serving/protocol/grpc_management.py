"""All other requests over gRPC, converted from and to the models of HTTP's JSON bodies."""

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


def write_server_metadata(metadata: ServerMetadata) -> pb.ServerMetadataResponse:
    """Return the response to ServerMetadata."""
    return pb.ServerMetadataResponse(**metadata.model_dump())


def write_model_metadata(metadata: ModelMetadata) -> pb.ModelMetadataResponse:
    """Return the response to ModelMetadata."""
    return pb.ModelMetadataResponse(**metadata.model_dump())


def write_statistics(statistics: Statistics) -> pb.ModelStatisticsResponse:
    """Return the response to ModelStatistics, whose message has neither ``invalid_count`` nor ``generation``."""
    fields = statistics.model_dump(exclude={"model_stats": {"__all__": {"invalid_count", "generation"}}})
    return pb.ModelStatisticsResponse(**fields)


def write_index(index: Sequence[ModelIndex]) -> pb.RepositoryIndexResponse:
    """Return the response to RepositoryIndex."""
    return pb.RepositoryIndexResponse(models=[version.model_dump() for version in index])


def read_index(request: pb.RepositoryIndexRequest) -> IndexRequest:
    """Read a request for the index. Raises RequestError."""
    _check_repository(request.repository_name)
    return IndexRequest(ready=request.ready)


def read_load(request: pb.RepositoryModelLoadRequest) -> LoadRequest:
    """Read a request to load a model. Raises RequestError."""
    _check_repository(request.repository_name)
    return check_fields(LoadRequest, {"parameters": read_parameters(request.parameters)})


def read_unload(request: pb.RepositoryModelUnloadRequest) -> UnloadRequest:
    """Read a request to unload a model. Raises RequestError."""
    _check_repository(request.repository_name)
    return check_fields(UnloadRequest, {"parameters": read_parameters(request.parameters)})


def _check_repository(name: str) -> None:
    if name:
        raise RequestError(
            f"the repository {short_repr(name)} cannot be chosen: there is only one, leave its name out"
        ).of("repository.unknown")
