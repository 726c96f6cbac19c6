"""A served language model in the terms of the Open Inference Protocol: its tensors, and its statistics."""

from collections.abc import Sequence

from app.serving.batching.statistics import Durations
from app.serving.generation.served import ServedGenerator
from app.serving.protocol.management import (
    GenerationCounts,
    InferenceStatistics,
    ModelMetadata,
    ModelStatistics,
    StatisticDuration,
    TensorMetadata,
)


def model_metadata(served: ServedGenerator, versions: Sequence[str]) -> ModelMetadata:
    """Return the tensors of a language model, and all served versions."""
    manifest = served.manifest
    return ModelMetadata(
        name=manifest.name,
        versions=list(versions),
        platform=served.engine.name,
        inputs=[TensorMetadata.of(spec) for spec in manifest.signature.inputs],
        outputs=[TensorMetadata.of(spec) for spec in manifest.signature.outputs],
    )


def model_statistics(served: ServedGenerator) -> ModelStatistics:
    """Return the statistics since the version was loaded.

    Inferences are complete answers, and executions are steps of the engine. For each request with complete answers,
    ``compute_input`` is the time from the engine's start to the first token, and ``compute_infer`` the time after it.
    """
    counted = served.statistics
    return ModelStatistics(
        name=served.manifest.name,
        version=served.version,
        last_inference=counted.last_answer_ms,
        inference_count=sum(counted.finishes.values()),
        execution_count=served.engine_statistics.steps,
        invalid_count=counted.invalid,
        generation=GenerationCounts(
            running=served.admission.running,
            waiting=served.admission.waiting,
            prompt_tokens=counted.prompt_tokens,
            generated_tokens=counted.generated_tokens,
        ),
        inference_stats=InferenceStatistics(
            success=_duration(counted.success),
            fail=_duration(counted.fail),
            queue=_duration(counted.queue),
            compute_input=_duration(counted.prefill),
            compute_infer=_duration(counted.decode),
            # Load generators expect all three to have one count.
            compute_output=StatisticDuration(count=counted.decode.count),
        ),
    )


def _duration(durations: Durations) -> StatisticDuration:
    return StatisticDuration(count=durations.count, ns=durations.ns)
