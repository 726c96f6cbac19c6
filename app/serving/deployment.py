"""Selects the published versions that an endpoint serves under a recipe's name."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from upath import UPath

from app.config import Recipe, Role, ServeConfig
from app.errors import RecipeError
from app.repository.aliases import Alias
from app.repository.manifest import Manifest, ServingDefaults
from app.repository.repository import Repository
from app.serving.cascade.build import build_cascade
from app.serving.config import CandidateConfig, DeployedModel, Scaling, VersionConfig
from app.storage import local_copy, no_op


def deployed_model(
    recipe: Recipe,
    storage: UPath,
    cores_of_nodes: Callable[[], Sequence[int]] = tuple,
    log: Callable[[str], None] = no_op,
) -> DeployedModel:
    """Verify and return the versions that the recipe names, else those with the aliases.

    Args:
        cores_of_nodes: returns the cores of each node that may hold replicas; empty if not known. It is called after
            the versions are verified.
        log: called with a line if the nodes fit fewer replicas or threads than ``jobs.compile`` measured.

    Raises:
        StorageError: a version is missing or was changed, or no version has an alias that the recipe asks for.
        RecipeError: two of them are the same version, one has other inputs or outputs than production, or one cannot be
            served as the recipe says.
        EngineError, DataError: from the calibration of a cascade, as in ``build_cascade``.
    """
    serve, repository = recipe.serve, Repository(storage)
    # Verify here, before any replica starts: a damaged file then fails the job, and nothing else.
    production = repository.verify(recipe.name, serve.version or repository.production(recipe.name))
    manifests: dict[Alias, Manifest] = {"production": production, **verified_candidates(recipe, storage)}
    _require_interchangeable(manifests)

    cores = cores_of_nodes()
    if difference := _smaller(production, serve, cores):
        log(difference)
    production = production.within(cores)

    def config_of(manifest: Manifest) -> VersionConfig:
        return VersionConfig.of(str(storage), manifest.within(cores), serve)

    def candidate_of(alias: Role) -> CandidateConfig | None:
        candidate = serve.candidates.get(alias)
        return CandidateConfig(version=config_of(manifests[alias]), percent=candidate.percent) if candidate else None

    in_production = config_of(production)
    if serve.tensor_parallel:
        _require_shards(repository.folder(recipe.name, production.version), serve.tensor_parallel.size)
    return DeployedModel(
        production=in_production,
        canary=candidate_of("canary"),
        shadow=candidate_of("shadow"),
        cascade=build_cascade(serve.cascade, in_production, serve, storage, cores) if serve.cascade else None,
        scaling=Scaling.of(serve, production.served(serve).replicas),
    )


def _require_shards(version: UPath, size: int) -> None:
    """Check without weights that a version can be split, so that the job fails here and not in the shards."""
    from app.serving.model.shard import require_shardable  # imports torch, which takes seconds

    with local_copy(version) as files:
        require_shardable(files, size)


def verified_candidates(recipe: Recipe, storage: UPath) -> dict[Alias, Manifest]:
    """Verify and return the versions that are tried beside production.

    Raises:
        StorageError: a version is missing or was changed, or no version has an alias that the recipe asks for.
    """
    repository = Repository(storage)
    return {
        alias: repository.verify(recipe.name, candidate.version or repository.candidate(recipe.name, alias))
        for alias, candidate in recipe.serve.candidates.items()
    }


def promote_named(recipe: Recipe, repository: Repository) -> None:
    """Give each version that the recipe names its alias. The others have theirs already."""
    if recipe.serve.version is not None:
        repository.promote(recipe.name, recipe.serve.version)
    for alias, candidate in recipe.serve.candidates.items():
        if candidate.version is not None:
            repository.promote(recipe.name, candidate.version, alias)


def _require_interchangeable(manifests: Mapping[Alias, Manifest]) -> None:
    """Raise RecipeError if a version cannot answer requests in place of production."""
    for first, second in combinations(manifests, 2):
        if manifests[first].version == manifests[second].version:
            raise RecipeError(
                f"serve.{second} is version {manifests[second].version}, and so is {first}: promote another version to "
                f"{second}, or leave serve.{second} out"
            ).of("versions.equal")
    # A client does not know which version answers, so all must take and return the same tensors.
    for alias, manifest in manifests.items():
        if difference := manifest.signature.difference(manifests["production"].signature):
            raise RecipeError(
                f"serve.{alias}: version {manifest.version} {difference}, as production does: such a version needs a "
                "name of its own"
            ).of("versions.differ")


def _smaller(manifest: Manifest, serve: ServeConfig, cores: Sequence[int]) -> str | None:
    """Return a message if fewer replicas or threads are served than were measured; else None."""
    measured, fitting = manifest.served(serve), manifest.within(cores).served(serve)
    if fitting == measured:
        return None
    return (
        f"{manifest.name}, version {manifest.version}, was measured with {_shape(measured)}, and the smallest of "
        f"{len(cores)} nodes that may serve it has {min(cores)} cores: {_shape(fitting)} are served; set "
        "serve.replicas and serve.threads for others"
    )


def _shape(serving: ServingDefaults) -> str:
    return f"replicas={serving.replicas} of threads={serving.threads}"
