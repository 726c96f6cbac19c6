"""From a recipe and what is published to what an endpoint serves under the recipe's name."""

from collections.abc import Mapping
from itertools import combinations

from upath import UPath

from app.config import Recipe, Role, ServeConfig
from app.errors import RecipeError
from app.repository.aliases import Alias
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.cascade.build import build_cascade
from app.serving.config import CandidateConfig, DeployedModel, Scaling, VersionConfig
from app.storage import local_copy


def deployed_model(recipe: Recipe, storage: UPath) -> DeployedModel:
    """The versions that the recipe names, else those with the aliases; every file of each is verified.

    Raises:
        StorageError: a version is not there or was changed, or none has an alias that the recipe asks for.
        RecipeError: two of them are one version, or one takes or gives other tensors than production, or cannot be
            served as the recipe says.
        EngineError, DataError: of a cascade's calibration, as ``build_cascade`` says.
    """
    serve, repository = recipe.serve, Repository(storage)
    production = repository.verify(recipe.name, serve.version or repository.production(recipe.name))
    manifests: dict[Alias, Manifest] = {"production": production}
    for alias, wanted in serve.candidates.items():
        manifests[alias] = repository.verify(recipe.name, wanted.version or repository.candidate(recipe.name, alias))
    _require_interchangeable(manifests)

    def config_of(manifest: Manifest) -> VersionConfig:
        return VersionConfig.of(str(storage), manifest, serve)

    def share_of(alias: Role) -> CandidateConfig | None:
        wanted = serve.candidates.get(alias)
        return CandidateConfig(version=config_of(manifests[alias]), percent=wanted.percent) if wanted else None

    in_production = config_of(production)
    if serve.tensor_parallel:
        from app.serving.model.shard import require_shardable  # imports torch, which other deploys need not wait for

        with local_copy(repository.folder(recipe.name, production.version)) as files:
            require_shardable(files, serve.tensor_parallel.size)
    return DeployedModel(
        production=in_production,
        canary=share_of("canary"),
        shadow=share_of("shadow"),
        cascade=build_cascade(serve.cascade, in_production, serve, storage) if serve.cascade else None,
        scaling=_scaling(serve, production),
    )


def promote_named(recipe: Recipe, repository: Repository) -> None:
    """Give each version that the recipe names its alias; those that it does not name have theirs."""
    if recipe.serve.version is not None:
        repository.promote(recipe.name, recipe.serve.version)
    for alias, wanted in recipe.serve.candidates.items():
        if wanted.version is not None:
            repository.promote(recipe.name, wanted.version, alias)


def _require_interchangeable(manifests: Mapping[Alias, Manifest]) -> None:
    """Refuse what cannot answer a request in place of the version in production. Raises RecipeError."""
    for one, other in combinations(manifests, 2):
        if manifests[one].version == manifests[other].version:
            raise RecipeError(
                f"serve.{other} is version {manifests[other].version}, and so is {one}: promote another version to "
                f"{other}, or leave serve.{other} out"
            )
    for alias, manifest in manifests.items():
        if difference := manifest.signature.difference(manifests["production"].signature):
            raise RecipeError(
                f"serve.{alias}: version {manifest.version} {difference}, as production does: such a version needs a "
                "name of its own"
            )


def _scaling(serve: ServeConfig, production: Manifest) -> Scaling:
    measured = production.served(serve).replicas
    min_replicas, max_replicas = serve.replica_range or (measured, measured)
    target_ms = serve.scaling.latency_target_ms
    return Scaling(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        cpus=serve.cpus_per_replica,
        gpus=serve.gpus_per_replica,
        resources=serve.resources,
        latency_target_s=target_ms / 1e3 if target_ms else None,
        upscale_delay_s=serve.scaling.upscale_delay_s,
        downscale_delay_s=serve.scaling.downscale_delay_s,
    )
