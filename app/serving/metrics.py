"""What an endpoint has counted, as metrics: the lines of ``docs/reference/metrics.md`` about models."""

from collections.abc import Iterator
from typing import Any

from app.serving.endpoint import Endpoint
from app.serving.generation.served import ServedGenerator
from app.serving.generation.shadow import GenerationShadow
from app.serving.model.served import ServedModel
from app.serving.rollout import Rollout, VersionChoice
from app.telemetry import catalog
from app.telemetry.metrics import Distribution, Sample

Values = Iterator[Sample | Distribution]


def endpoint_values(endpoint: Endpoint) -> Values:
    """Yield every value of an endpoint. It takes no lock and waits for nothing: all of it is plain numbers."""
    yield from endpoint.traffic.samples()
    for (name, version), loads in endpoint.loads.items():
        yield catalog.LOADS.of(loads.count, name, version)
        yield catalog.LOAD_SECONDS.of(loads.ns / 1e9, name, version)
    for name, served in endpoint.counted:
        yield from _model_values(name, served)
    for name, rollout in endpoint.rollouts.items():
        yield from _rollout_values(name, rollout)
    for name, language in endpoint.generators.items():
        for generator in language.versions:
            yield from _generator_values(name, generator)
        yield from _share_values(name, language)
        if language.shadow:
            yield from _shadow_values(name, language.shadow)
    for name, model in endpoint.config.deployed.items():
        if (target_s := model.scaling.latency_target_s) is not None:
            yield catalog.LATENCY_TARGET_SECONDS.of(target_s, name)


def _model_values(name: str, served: ServedModel) -> Values:
    counted, version = served.batching, served.version
    yield counted.request_s.of(catalog.REQUEST_SECONDS, name, version)
    yield counted.queue_s.of(catalog.QUEUE_SECONDS, name, version)
    yield counted.engine_s.of(catalog.ENGINE_SECONDS, name, version)
    yield counted.batch_rows.of(catalog.BATCH_ROWS, name, version)
    yield catalog.ROWS.of(counted.inferences, name, version)
    yield catalog.WAITING.of(served.waiting, name, version)
    yield catalog.IN_FLIGHT.of(served.in_flight, name, version)
    # No sample before the first request, because 0 s would look like a fast one.
    if counted.first_answer_s is not None:
        yield catalog.FIRST_ANSWER_SECONDS.of(counted.first_answer_s, name, version)
    for release, calls in counted.releases.items():
        yield catalog.BATCHES.of(calls, name, version, release.value)
    for failure, requests in counted.failures.items():
        yield catalog.FAILURES.of(requests, name, version, failure.value)


def _generator_values(name: str, served: ServedGenerator) -> Values:
    counted, engine, version = served.statistics, served.engine_statistics, served.version
    yield counted.first_token_s.of(catalog.GENERATION_FIRST_TOKEN_SECONDS, name, version)
    yield counted.between_tokens_s.of(catalog.GENERATION_BETWEEN_TOKENS_SECONDS, name, version)
    yield counted.request_s.of(catalog.GENERATION_REQUEST_SECONDS, name, version)
    yield counted.queue_s.of(catalog.GENERATION_QUEUE_SECONDS, name, version)
    yield catalog.GENERATION_PROMPT_TOKENS.of(counted.prompt_tokens, name, version)
    yield catalog.GENERATION_TOKENS.of(counted.generated_tokens, name, version)
    yield catalog.GENERATION_STEPS.of(engine.steps, name, version)
    yield catalog.GENERATION_RUNNING.of(engine.running, name, version)
    yield catalog.GENERATION_WAITING_TOKENS.of(served.admission.waiting_tokens, name, version)
    yield catalog.GENERATION_QUEUE_LIMIT_TOKENS.of(served.policy.queue_tokens, name, version)
    yield catalog.GENERATION_CACHE_RATIO.of(engine.cache_usage, name, version)
    yield catalog.GENERATION_PREEMPTIONS.of(engine.preemptions, name, version)
    yield catalog.GENERATION_ENGINE_RESTARTS.of(engine.restarts, name, version)
    yield catalog.WAITING.of(served.admission.waiting, name, version)
    yield catalog.IN_FLIGHT.of(served.in_flight, name, version)
    for finish, answers in counted.finishes.items():
        yield catalog.GENERATION_ANSWERS.of(answers, name, version, finish)
    for failure, requests in counted.failures.items():
        yield catalog.FAILURES.of(requests, name, version, failure.value)


def _shadow_values(name: str, shadow: GenerationShadow) -> Values:
    version = shadow.served.version
    for agrees in (True, False):
        label = str(agrees).lower()
        yield catalog.GENERATION_SHADOW_ANSWERS.of(shadow.answers[agrees], name, version, label)
        yield catalog.GENERATION_SHADOW_TOKENS.of(shadow.tokens[agrees], name, version, label)
    for side, tokens in shadow.lengths.items():
        yield catalog.GENERATION_SHADOW_LENGTH_TOKENS.of(tokens, name, version, side)


def _share_values(name: str, rollout: VersionChoice[Any]) -> Values:
    for role, served, share in rollout.shares:
        yield catalog.TRAFFIC_RATIO.of(share, name, served.version, role)


def _rollout_values(name: str, rollout: Rollout) -> Values:
    yield from _share_values(name, rollout)
    if cascade := rollout.cascade:
        for stage, rows in enumerate(cascade.rows.tolist()):
            yield catalog.CASCADE_ROWS.of(rows, name, cascade.version, str(stage))
    if shadow := rollout.shadow:
        for agrees, rows in shadow.rows.items():
            yield catalog.SHADOW_ROWS.of(rows, name, shadow.served.version, str(agrees).lower())
