"""Every metric of Rayloom: the table in ``docs/reference/metrics.md``, and what the dashboards and rules ask for."""

from functools import partial

from app.telemetry.metrics import Kind, Metric

_VERSION = ("model", "version")
_RUN = ("run", "recipe")


def _of(kind: Kind, name: str, labels: tuple[str, ...], description: str) -> Metric:
    return Metric(f"rayloom_{name}", kind, description, labels)


_counter, _gauge, _histogram = (partial(_of, kind) for kind in (Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM))

# Of a replica. Serve adds the labels application, deployment and replica.
REQUESTS = _counter("requests", (*_VERSION, "protocol", "outcome"), "Requests for inference, by how they ended.")
RECEIVED_BYTES = _counter("received_bytes", (*_VERSION, "protocol"), "Bodies and messages of requests.")
SENT_BYTES = _counter("sent_bytes", (*_VERSION, "protocol"), "Bodies and messages of answers.")
REQUEST_SECONDS = _histogram("request_seconds", _VERSION, "From a request's place in the queue to its answer.")
QUEUE_SECONDS = _histogram("queue_seconds", _VERSION, "From a request's place in the queue to the engine.")
ENGINE_SECONDS = _histogram("engine_seconds", _VERSION, "A call of the engine.")
BATCH_ROWS = _histogram("batch_rows", _VERSION, "Rows of a call of the engine.")
ROWS = _counter("rows", _VERSION, "Rows of the requests that were answered.")
BATCHES = _counter("batches", (*_VERSION, "reason"), "Calls of an engine, by the reason for their start.")
FAILURES = _counter("failures", (*_VERSION, "reason"), "Valid requests that a model did not answer, by why.")
WAITING = _gauge("waiting", _VERSION, "Requests that an engine has not begun with.")
IN_FLIGHT = _gauge("in_flight", _VERSION, "Requests that a model has taken and not answered yet.")
LOADS = _counter("loads", _VERSION, "Cold starts: how often the model was loaded.")
LOAD_SECONDS = _counter("load_seconds", _VERSION, "The time that these loads took together.")
FIRST_ANSWER_SECONDS = _gauge("first_answer_seconds", _VERSION, "The first request's time after the last cold start.")
TRAFFIC_RATIO = _gauge("traffic_ratio", (*_VERSION, "role"), "Share of the requests that name no version.")
LATENCY_TARGET_SECONDS = _gauge("latency_target_seconds", ("model",), "The target for the 95th percentile of latency.")
CASCADE_ROWS = _counter("cascade_rows", (*_VERSION, "stage"), "Rows of a cascade, by the stage that answered them.")
SHADOW_ROWS = _counter("shadow_rows", (*_VERSION, "agrees"), "Rows of a shadow, by whether its answer is the client's.")

SERVING = (
    REQUESTS, RECEIVED_BYTES, SENT_BYTES, REQUEST_SECONDS, QUEUE_SECONDS, ENGINE_SECONDS, BATCH_ROWS, ROWS, BATCHES,
    FAILURES, WAITING, IN_FLIGHT, LOADS, LOAD_SECONDS, FIRST_ANSWER_SECONDS, TRAFFIC_RATIO, LATENCY_TARGET_SECONDS,
    CASCADE_ROWS, SHADOW_ROWS,
)  # fmt: skip

# Of a language model in a replica.
GENERATION_FIRST_TOKEN_SECONDS = _histogram(
    "generation_first_token_seconds", _VERSION, "From a request's arrival to its first token."
)
GENERATION_BETWEEN_TOKENS_SECONDS = _histogram(
    "generation_between_tokens_seconds", _VERSION, "Between two tokens of an answer."
)
GENERATION_REQUEST_SECONDS = _histogram(
    "generation_request_seconds", _VERSION, "From a request's arrival to its last token."
)
GENERATION_QUEUE_SECONDS = _histogram(
    "generation_queue_seconds", _VERSION, "From a request's arrival to the engine's start with its prompt."
)
GENERATION_PROMPT_TOKENS = _counter("generation_prompt_tokens", _VERSION, "Tokens of prompts that the engine has got.")
GENERATION_TOKENS = _counter("generation_tokens", _VERSION, "Tokens of answers, complete or not.")
GENERATION_ANSWERS = _counter("generation_answers", (*_VERSION, "finish"), "Complete answers, by their end.")
GENERATION_STEPS = _counter("generation_steps", _VERSION, "Steps of the engine.")
GENERATION_RUNNING = _gauge("generation_running", _VERSION, "Answers that the engine generates.")
GENERATION_WAITING_TOKENS = _gauge(
    "generation_waiting_tokens", _VERSION, "Tokens of the prompts and promised answers that wait."
)
GENERATION_QUEUE_LIMIT_TOKENS = _gauge(
    "generation_queue_limit_tokens", _VERSION, "The limit of waiting tokens, above which requests are refused."
)
GENERATION_CACHE_RATIO = _gauge("generation_cache_ratio", _VERSION, "Share of the cache that is in use.")
GENERATION_PREEMPTIONS = _counter(
    "generation_preemptions", _VERSION, "Answers whose cache the engine took away, which should never happen."
)
GENERATION_ENGINE_RESTARTS = _counter(
    "generation_engine_restarts", _VERSION, "Processes of the engine that died and were replaced."
)
GENERATION_SHADOW_ANSWERS = _counter(
    "generation_shadow_answers", (*_VERSION, "agrees"), "Greedy answers of a shadow, by whether they are the client's."
)
GENERATION_SHADOW_TOKENS = _counter(
    "generation_shadow_tokens", (*_VERSION, "agrees"), "Tokens of these, by whether they come before a difference."
)
GENERATION_SHADOW_LENGTH_TOKENS = _counter(
    "generation_shadow_length_tokens",
    (*_VERSION, "side"),
    "Tokens of all copied answers, the client's and the shadow's.",
)

GENERATION = (
    GENERATION_FIRST_TOKEN_SECONDS, GENERATION_BETWEEN_TOKENS_SECONDS, GENERATION_REQUEST_SECONDS,
    GENERATION_QUEUE_SECONDS, GENERATION_PROMPT_TOKENS, GENERATION_TOKENS, GENERATION_ANSWERS,
    GENERATION_STEPS, GENERATION_RUNNING, GENERATION_WAITING_TOKENS, GENERATION_QUEUE_LIMIT_TOKENS,
    GENERATION_CACHE_RATIO, GENERATION_PREEMPTIONS, GENERATION_ENGINE_RESTARTS, GENERATION_SHADOW_ANSWERS,
    GENERATION_SHADOW_TOKENS, GENERATION_SHADOW_LENGTH_TOKENS,
)  # fmt: skip

# Of a training run, told by its first worker.
TRAIN_STEP = _gauge("train_step", _RUN, "Optimizer steps so far.")
TRAIN_STEPS_PLANNED = _gauge("train_steps_planned", _RUN, "Optimizer steps of the whole run.")
TRAIN_EPOCH = _gauge("train_epoch", _RUN, "The epoch under way.")
TRAIN_LOSS = _gauge("train_loss", _RUN, "Loss of the last step that was reported.")
TRAIN_VAL_LOSS = _gauge("train_val_loss", _RUN, "Validation loss of the last epoch.")
TRAIN_VAL_ACCURACY_RATIO = _gauge("train_val_accuracy_ratio", _RUN, "Validation accuracy of the last epoch.")
TRAIN_VAL_METRIC = _gauge("train_val_metric", (*_RUN, "metric"), "Another metric of the task in the last epoch.")
TRAIN_LEARNING_RATE = _gauge("train_learning_rate", _RUN, "Learning rate of the last step.")
TRAIN_GRADIENT_NORM = _gauge("train_gradient_norm", _RUN, "Norm of the last step's gradient, before clipping.")
TRAIN_SAMPLES_PER_SECOND = _gauge("train_samples_per_second", _RUN, "Samples of all workers together.")
TRAIN_TOKENS_PER_SECOND = _gauge("train_tokens_per_second", _RUN, "Tokens of all workers together.")
TRAIN_MFU_RATIO = _gauge("train_mfu_ratio", _RUN, "Model FLOPs utilisation.")
TRAIN_DATA_STALL_RATIO = _gauge(
    "train_data_stall_ratio", _RUN, "Share of the step that the first worker waits for data."
)
TRAIN_COMMUNICATION_RATIO = _gauge("train_communication_ratio", _RUN, "Share of profiled steps that only communicates.")
TRAIN_MEMORY_PEAK_BYTES = _gauge("train_memory_peak_bytes", _RUN, "The first worker's peak: on its GPU, or resident.")
TRAIN_MEMORY_FRAGMENTATION_RATIO = _gauge(
    "train_memory_fragmentation_ratio", _RUN, "Reserved on the GPU, and unusable."
)
TRAIN_STEP_SECONDS = _gauge("train_step_seconds", _RUN, "Duration of a step.")
TRAIN_RANK_BUSY_SECONDS = _gauge(
    "train_rank_busy_seconds", (*_RUN, "rank"), "A rank's own work in a step, before it waits."
)
TRAIN_REPORT_TIMESTAMP_SECONDS = _gauge(
    "train_report_timestamp_seconds", _RUN, "When a step or epoch was last reported."
)
TRAIN_CHECKPOINT_TIMESTAMP_SECONDS = _gauge(
    "train_checkpoint_timestamp_seconds", _RUN, "When a checkpoint was committed."
)
TRAIN_CHECKPOINT_SECONDS = _gauge("train_checkpoint_seconds", _RUN, "How long the last checkpoint took to store.")
TRAIN_OWN_ALERTS = _gauge("train_own_alerts", (*_RUN, "about"), "1: the recipe has alerts about this itself.")
TRAIN_FAILURES = _counter("train_failures", ("run",), "How often workers failed. Ray Train starts them again.")

TRAINING = (
    TRAIN_STEP, TRAIN_STEPS_PLANNED, TRAIN_EPOCH, TRAIN_LOSS, TRAIN_VAL_LOSS, TRAIN_VAL_ACCURACY_RATIO,
    TRAIN_VAL_METRIC,
    TRAIN_LEARNING_RATE, TRAIN_GRADIENT_NORM, TRAIN_SAMPLES_PER_SECOND, TRAIN_TOKENS_PER_SECOND, TRAIN_MFU_RATIO,
    TRAIN_DATA_STALL_RATIO, TRAIN_COMMUNICATION_RATIO, TRAIN_MEMORY_PEAK_BYTES, TRAIN_MEMORY_FRAGMENTATION_RATIO,
    TRAIN_STEP_SECONDS, TRAIN_RANK_BUSY_SECONDS, TRAIN_REPORT_TIMESTAMP_SECONDS, TRAIN_CHECKPOINT_TIMESTAMP_SECONDS,
    TRAIN_CHECKPOINT_SECONDS, TRAIN_OWN_ALERTS, TRAIN_FAILURES,
)  # fmt: skip

# Of a search, told by its job.
TUNE_TRIALS = _gauge("tune_trials", (*_RUN, "state"), "Trials by state.")
TUNE_BEST_VALUE = _gauge("tune_best_value", (*_RUN, "metric"), "The best value so far.")
TUNE_EPOCHS = _counter("tune_epochs", _RUN, "Epochs that were trained.")

TUNING = (TUNE_TRIALS, TUNE_BEST_VALUE, TUNE_EPOCHS)
