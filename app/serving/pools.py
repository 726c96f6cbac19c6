"""The pools of an endpoint, and how they are named in Ray Serve.

A pool is a group of replicas with models, resources and a number of replicas of its own. It is an application of Ray
Serve, so that it scales, fails and is placed by itself. Models without ``serve.pool`` are in the shared pool. Its
replicas also pass on requests for models of other pools.
"""

APPLICATION = "rayloom"
"""The Ray Serve application of the shared pool. Those of other pools begin with this name."""
SHARED = None
"""The pool of models without ``serve.pool``."""
Pool = str | None
_PATHS = "/pools/"
"""The path of a pool's own routes, before its name."""


def application_of(pool: Pool) -> str:
    """Return the name of a pool's application."""
    return APPLICATION if pool is SHARED else f"{APPLICATION}-{pool}"


def is_ours(application: str) -> bool:
    """Return whether an application of Ray Serve belongs to the endpoint."""
    return application == APPLICATION or application.startswith(f"{APPLICATION}-")


def pool_of(application: str) -> Pool:
    """Return the pool of one of our applications."""
    return SHARED if application == APPLICATION else application.removeprefix(f"{APPLICATION}-")


def prefix_of(pool: Pool) -> str:
    """Return the prefix of a pool's routes. It is empty for the shared pool."""
    return "" if pool is SHARED else f"{_PATHS}{pool}"


def named(pool: Pool) -> str:
    """Return how messages call a pool."""
    return "the shared pool" if pool is SHARED else f"pool {pool!r}"
