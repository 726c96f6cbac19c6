"""Deploy many models in one step, as a job of the cluster: python -m benchmarks.many.fill COUNT"""

import sys

from app.serving.config import EndpointConfig
from app.serving.plan import deployed_model
from app.storage import open_storage
from benchmarks.many.population import name_of, recipe_in
from jobs._cluster import connect
from jobs._endpoint import alone, change_over, wanted

_READY_S = 240.0


def main(count: int) -> None:
    """Serve the first ``count`` models of the cluster's storage beside those that are already served."""
    storage = open_storage(None)
    models = {name_of(number): deployed_model(recipe_in(storage, name_of(number)), storage) for number in range(count)}
    connect()
    with alone():
        before = wanted()
        change_over(before, EndpointConfig(models={**before.models, **models}, access=before.access), _READY_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
