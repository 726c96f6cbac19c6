"""Selects the published versions that an endpoint serves under a recipe's name."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from upath import UPath

from app.config import OnDemandConfig, Recipe, ServeConfig
from app.errors import RecipeError
from app.repository.aliases import Alias
from app.repository.manifest import Manifest, ServingDefaults
from app.repository.repository import Repository
from app.serving.cascade.build import build_cascade
from app.serving.config import AnyDeployed, DeployedGenerator, DeployedModel, GeneratorConfig, VersionConfig
from app.serving.demand import Scaling
from app.storage import local_copy, no_op

_ONLY_BATCHES = ("batching", "cascade", "on_demand", "tensor_parallel")
_ONLY_TOKENS = ("generation",)
"""Keys of ``serve`` for one kind of model."""
_DEFAULTS = ServeConfig()


def deployed_model(
    recipe: Recipe,
    storage: UPath,
    cores_of_nodes: Callable[[], Sequence[int]] = tuple,
    log: Callable[[str], None] = no_op,
) -> AnyDeployed:
    """Verify and return the versions that the recipe names, else those with the aliases.

    The version in production decides which kind of model it is: whether it answers batches or generates tokens.

    Args:
        cores_of_nodes: returns the cores of each node that may hold replicas; empty if not known. It is called after
            the versions are verified.
        log: called with a line if the nodes fit fewer replicas or threads than ``jobs.compile`` measured.

    Raises:
        StorageError: a version is missing or was changed, or no version has an alias that the recipe asks for.
        RecipeError: two of them are the same version, one cannot answer in place of production, or one cannot be
            served as the recipe says.
        EngineError, DataError: from the calibration of a cascade, as in ``build_cascade``.
    """
    serve, repository = recipe.serve, Repository(storage)
    # Verify here, before any replica starts: a damaged file then fails the job, and nothing else.
    production = repository.verify(recipe.name, serve.version or repository.production(recipe.name))
    manifests: dict[Alias, Manifest] = {"production": production, **verified_candidates(recipe, storage)}
    _require_interchangeable(manifests)
    _require_keys(production, serve)

    cores = cores_of_nodes()
    if difference := _smaller(production, serve, cores):
        log(difference)
    fitting = {alias: manifest.within(cores) for alias, manifest in manifests.items()}
    scaling = Scaling.of(serve, fitting["production"].served(serve).replicas)
    if production.generation:
        generators = {alias: GeneratorConfig.of(str(storage), manifest, serve) for alias, manifest in fitting.items()}
        return DeployedGenerator.of(generators, serve, scaling)
    versions = {alias: VersionConfig.of(str(storage), manifest, serve) for alias, manifest in fitting.items()}
    if serve.tensor_parallel:
        _require_shards(repository.folder(recipe.name, production.version), serve.tensor_parallel.size)
    model = DeployedModel.of(versions, serve, scaling)
    if serve.on_demand:
        return model.model_copy(update={"on_demand_bytes": _budget(model.production, serve.on_demand)})
    if serve.cascade is None:
        return model
    cascade = build_cascade(serve.cascade, model.production, serve, storage, cores)
    return model.model_copy(update={"cascade": cascade})


def _budget(version: VersionConfig, config: OnDemandConfig) -> int:
    """Return the total size of models loaded on demand. Raises RecipeError if this one alone is larger."""
    budget = config.memory_mb * 2**20
    if version.size_bytes > budget:
        raise RecipeError(
            f"serve.on_demand.memory_mb is {config.memory_mb}, and {version.title} alone has "
            f"{version.size_bytes / 2**20:.0f}: give as many or more"
        ).of("on_demand.memory", "serve.on_demand.memory_mb")
    return budget


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
    # A client does not know which version answers.
    for alias, manifest in manifests.items():
        if difference := _difference(manifest, manifests["production"]):
            raise RecipeError(
                f"serve.{alias}: version {manifest.version} {difference}, as production does: such a version needs a "
                "name of its own"
            ).of("versions.differ")


def _difference(manifest: Manifest, production: Manifest) -> str | None:
    """Return why a version cannot answer what the one in production answers; None if it can.

    Versions that answer batches need the same tensors. Language models may have other tokenizers, because their
    requests are texts: they need a chat template if production has one, and the same length or more.
    """
    ours, theirs = manifest.generation, production.generation
    if ours is None and theirs is None:
        return manifest.signature.difference(production.signature)
    if ours is None:
        return "answers batches of tensors: expected to generate tokens"
    if theirs is None:
        return "generates tokens: expected to answer batches of tensors"
    if theirs.has_chat and not ours.has_chat:
        return "has no chat template: expected to answer chats"
    if ours.context_length < theirs.context_length:
        return f"takes {ours.context_length} tokens: expected to take {theirs.context_length} or more"
    return None


def _require_keys(production: Manifest, serve: ServeConfig) -> None:
    """Raise RecipeError if the recipe sets what its kind of model does not have."""
    kind, wrong = (
        ("answers batches", _ONLY_TOKENS) if production.generation is None else ("generates tokens", _ONLY_BATCHES)
    )
    # A resolved recipe has every key, so what differs from the default counts.
    for key in wrong:
        if getattr(serve, key) != getattr(_DEFAULTS, key):
            raise RecipeError(
                f"serve.{key} is set, and {production.name}/{production.version} {kind}: leave it out"
                + ("; serve.generation has the keys of language models" if key == "batching" else "")
            ).of("serve.kind", f"serve.{key}")


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
