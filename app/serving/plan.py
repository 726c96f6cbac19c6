"""From a recipe and what is published to what an endpoint serves under the recipe's name."""

from dataclasses import dataclass
from itertools import combinations

from upath import UPath

from app.config import Recipe
from app.errors import RecipeError
from app.repository.aliases import Alias
from app.repository.manifest import Manifest
from app.repository.repository import Repository
from app.serving.config import DeployedModel, Scaling, Share, VersionConfig


@dataclass(frozen=True)
class _Named:
    """A version, by what it is to be."""

    alias: Alias
    manifest: Manifest


def deployed_model(recipe: Recipe, storage: UPath) -> DeployedModel:
    """The versions that the recipe names, else those with the aliases; every file of each is verified.

    Raises:
        StorageError: a version is not there or was changed, or none has an alias that the recipe asks for.
        RecipeError: two of them are one version, or one takes or gives other tensors than production, or cannot be
            served as the recipe says.
    """
    serve, repository = recipe.serve, Repository(storage)
    named = [_Named("production", repository.verify(recipe.name, serve.version or repository.production(recipe.name)))]
    for alias, wanted in serve.tried.items():
        version = wanted.version or repository.tried(recipe.name, alias)
        named.append(_Named(alias, repository.verify(recipe.name, version)))
    _require_interchangeable(named)

    def config_of(manifest: Manifest) -> VersionConfig:
        return VersionConfig.of(str(storage), recipe.name, manifest.version, manifest.served(serve), serve)

    production, *tried = named
    shares = {
        each.alias: Share(version=config_of(each.manifest), percent=wanted.percent)
        for each, wanted in zip(tried, serve.tried.values(), strict=True)
    }
    return DeployedModel(
        production=config_of(production.manifest),
        canary=shares.get("canary"),
        shadow=shares.get("shadow"),
        scaling=_scaling(recipe, production.manifest),
    )


def promote_named(recipe: Recipe, repository: Repository) -> None:
    """Give each version that the recipe names its alias; those that it does not name have theirs."""
    if recipe.serve.version is not None:
        repository.promote(recipe.name, recipe.serve.version)
    for alias, wanted in recipe.serve.tried.items():
        if wanted.version is not None:
            repository.promote(recipe.name, wanted.version, alias)


def _require_interchangeable(named: list[_Named]) -> None:
    """Refuse what would answer a request otherwise than the version in production. Raises RecipeError."""
    for one, other in combinations(named, 2):
        if one.manifest.version == other.manifest.version:
            raise RecipeError(
                f"serve.{other.alias} is version {other.manifest.version}, and so is {one.alias}: promote another "
                f"version to {other.alias}, or leave serve.{other.alias} out"
            )
    for each in named[1:]:
        if difference := each.manifest.signature.difference(named[0].manifest.signature):
            raise RecipeError(
                f"serve.{each.alias}: version {each.manifest.version} {difference}, as production does: such a version "
                "needs a name of its own"
            )


def _scaling(recipe: Recipe, manifest: Manifest) -> Scaling:
    serve = recipe.serve
    measured = manifest.served(serve).replicas
    least, most = serve.replica_range or (measured, measured)
    target_ms = serve.scaling.latency_target_ms
    return Scaling(
        least=least,
        most=most,
        cpus=serve.cpus_per_replica,
        latency_target_s=target_ms and target_ms / 1e3,
        upscale_delay_s=serve.scaling.upscale_delay_s,
        downscale_delay_s=serve.scaling.downscale_delay_s,
    )
