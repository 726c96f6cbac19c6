"""The local cluster's endpoint, as the command line asks it."""

import httpx
from pydantic import TypeAdapter, ValidationError

from app.cluster.state import ClusterState
from app.errors import ClusterError
from app.serving.protocol.management import ModelIndex

_INDEX = TypeAdapter(list[ModelIndex])


def served_models(cluster: ClusterState) -> list[ModelIndex]:
    """The models that the endpoint has loaded: none, if nothing was ever deployed.

    Raises:
        ClusterError: something is there and does not say.
    """
    try:
        answer = httpx.post(f"{cluster.endpoint}/v2/repository/index", timeout=5.0)
        if answer.status_code == httpx.codes.NOT_FOUND:  # Serve without an application
            return []
        return _INDEX.validate_json(answer.raise_for_status().content)
    except httpx.ConnectError:
        return []
    except (httpx.HTTPError, ValidationError) as error:
        raise ClusterError(
            f"the endpoint {cluster.endpoint} does not say which models it has loaded ({error}): "
            "its logs are in the Ray dashboard"
        ) from error
