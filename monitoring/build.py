"""Build Grafana's dashboards: python -m monitoring.build

They are written to ``monitoring/dashboards``. A test builds them again and compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

FOLDER = Path(__file__).parent / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_SPAN, _HEIGHT = 8, 7


@dataclass(frozen=True)
class Panel:
    """A chart. Every expression comes with what its lines are called."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    description: str = ""


@dataclass(frozen=True)
class Board:
    """A dashboard: rows of panels, by their titles."""

    title: str
    rows: dict[str, list[Panel]]
    variables: dict[str, str]
    """The labels to choose from, with a metric that has each."""


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Return the expressions of three quantiles of a histogram, by model."""
    buckets = f'sum by (model, le) (rate({metric}_bucket{{model=~"$model"}}[$__rate_interval]))'
    return [
        (f"histogram_quantile({share}, {buckets})", f"{{{{model}}}} p{share * 100:g}") for share in (0.5, 0.95, 0.99)
    ]


def rate(metric: str, *by: str) -> tuple[str, str]:
    """Return the expression of a counter's rate, summed by some labels."""
    labels = ", ".join(by)
    return (
        f'sum by ({labels}) (rate({metric}{{model=~"$model"}}[$__rate_interval]))',
        " ".join(f"{{{{{label}}}}}" for label in by),
    )


def of_run(metric: str, *more: str) -> tuple[str, str]:
    """Return the expression of a run's gauge. The run comes last in a line's name: it is long, and may be cut off."""
    return f'ray_rayloom_train_{metric}{{run=~"$run"}}', ", ".join(
        [*(f"{label} {{{{{label}}}}}" for label in more), "{{run}}"]
    )


_ERRORS = 'ray_rayloom_requests_total{model=~"$model", outcome=~"overload|deadline|engine|error"}'
_ERROR_RATIO = (
    f"(sum(rate({_ERRORS}[$__rate_interval])) or vector(0)) / "
    'sum(rate(ray_rayloom_requests_total{model=~"$model", outcome!="cancelled"}[$__rate_interval]))'
)
_SHADOW = 'ray_rayloom_shadow_rows_total{model=~"$model"'

SERVING = Board(
    "Rayloom serving",
    {
        "Requests": [
            Panel("Requests by outcome", "reqps", [rate("ray_rayloom_requests_total", "model", "outcome")]),
            Panel("Requests by version", "reqps", [rate("ray_rayloom_requests_total", "model", "version")]),
            Panel("Requests by protocol", "reqps", [rate("ray_rayloom_requests_total", "protocol")]),
            Panel(
                "Errors", "percentunit", [(_ERROR_RATIO, "of all requests")], "What the endpoint should have answered."
            ),
            Panel(
                "Invalid requests",
                "reqps",
                [
                    (
                        'sum by (model, protocol) (rate(ray_rayloom_requests_total{model=~"$model", '
                        'outcome="invalid"}[$__rate_interval]))',
                        "{{model}} {{protocol}}",
                    )
                ],
                "Refused as malformed: a mistake of the client, not of the model.",
            ),
            Panel("Rows", "rps", [rate("ray_rayloom_rows_total", "model", "version")]),
            Panel(
                "Bytes",
                "Bps",
                [rate("ray_rayloom_received_bytes_total", "model"), rate("ray_rayloom_sent_bytes_total", "model")],
            ),
        ],
        "Latency": [
            Panel("Whole request", "s", quantiles("ray_rayloom_request_seconds"), "From the queue to the answer."),
            Panel("In the queue", "s", quantiles("ray_rayloom_queue_seconds")),
            Panel("In the engine", "s", quantiles("ray_rayloom_engine_seconds"), "Of a call, which requests share."),
        ],
        "Batching": [
            Panel(
                "Rows of a call",
                "short",
                [
                    (
                        'sum by (model) (rate(ray_rayloom_batch_rows_sum{model=~"$model"}[$__rate_interval])) / '
                        'sum by (model) (rate(ray_rayloom_batch_rows_count{model=~"$model"}[$__rate_interval]))',
                        "{{model}}",
                    )
                ],
            ),
            Panel("Calls by reason", "ops", [rate("ray_rayloom_batches_total", "model", "reason")]),
            Panel("Waiting", "short", [('sum by (model) (ray_rayloom_waiting{model=~"$model"})', "{{model}}")]),
            Panel("In flight", "short", [('sum by (model) (ray_rayloom_in_flight{model=~"$model"})', "{{model}}")]),
            Panel(
                "Failures by reason",
                "reqps",
                [rate("ray_rayloom_failures_total", "model", "reason")],
                "Without invalid requests, which are their clients' mistakes.",
            ),
            Panel(
                "Replicas", "short", [("sum by (deployment) (ray_serve_deployment_replica_healthy)", "{{deployment}}")]
            ),
        ],
        "Versions": [
            Panel(
                "Share of the traffic",
                "percentunit",
                [
                    (
                        'avg by (model, version, role) (ray_rayloom_traffic_ratio{model=~"$model"})',
                        "{{model}} {{version}} {{role}}",
                    )
                ],
            ),
            Panel(
                "Shadow agrees",
                "percentunit",
                [
                    (
                        f'(sum by (model, version) (rate({_SHADOW}, agrees="true"}}[5m])) or '
                        f"0 * sum by (model, version) (rate({_SHADOW}}}[5m]))) / "  # if it never agrees
                        f"sum by (model, version) (rate({_SHADOW}}}[5m]))",
                        "{{model}} {{version}}",
                    )
                ],
                "Rows where the shadow's answer agrees with the client's.",
            ),
            Panel("Cascade rows by stage", "rps", [rate("ray_rayloom_cascade_rows_total", "model", "stage")]),
            Panel(
                "Cold start",
                "s",
                [
                    (
                        'sum by (model, version) (ray_rayloom_load_seconds_total{model=~"$model"}) / '
                        'sum by (model, version) (ray_rayloom_loads_total{model=~"$model"})',
                        "{{model}} {{version}} load",
                    ),
                    (
                        'max by (model, version) (ray_rayloom_first_answer_seconds{model=~"$model"})',
                        "{{model}} {{version}} first answer",
                    ),
                ],
            ),
        ],
    },
    {"model": "ray_rayloom_loads_total"},
)


def share(part: str, whole: str) -> str:
    """Return the expression of a counter's rate as a share of another's, by model."""
    rates = (f'sum by (model) (rate({metric}{{model=~"$model"}}[$__rate_interval]))' for metric in (part, whole))
    return " / ".join(rates)


_GENERATION = "ray_rayloom_generation"

GENERATION = Board(
    "Rayloom language models",
    {
        "Latency": [
            Panel("Time to the first token", "s", quantiles(f"{_GENERATION}_first_token_seconds"), "From its arrival."),
            Panel("Time between tokens", "s", quantiles(f"{_GENERATION}_between_tokens_seconds"), "Of one answer."),
            Panel("Whole request", "s", quantiles(f"{_GENERATION}_request_seconds"), "From arrival to the last token."),
            Panel("In the queue", "s", quantiles(f"{_GENERATION}_queue_seconds"), "Until the engine has the prompt."),
        ],
        "Tokens": [
            Panel("Generated tokens", "ops", [rate(f"{_GENERATION}_tokens_total", "model", "version")]),
            Panel("Prompt tokens", "ops", [rate(f"{_GENERATION}_prompt_tokens_total", "model", "version")]),
            Panel(
                "Tokens a step",
                "short",
                [(share(f"{_GENERATION}_tokens_total", f"{_GENERATION}_steps_total"), "{{model}}")],
            ),
            Panel("Answers by their end", "reqps", [rate(f"{_GENERATION}_answers_total", "model", "finish")]),
            Panel("Failures by reason", "reqps", [rate("ray_rayloom_failures_total", "model", "reason")]),
        ],
        "Load": [
            Panel("Running", "short", [(f'sum by (model) ({_GENERATION}_running{{model=~"$model"}})', "{{model}}")]),
            Panel(
                "Waiting",
                "short",
                [(f'sum by (model) (ray_rayloom_waiting{{model=~"$model"}} and {_GENERATION}_running)', "{{model}}")],
                "Answers that the engine has not begun with.",
            ),
            Panel(
                "Waiting tokens",
                "percentunit",
                [
                    (
                        f'max by (model) ({_GENERATION}_waiting_tokens{{model=~"$model"}} / '
                        f"{_GENERATION}_queue_limit_tokens)",
                        "{{model}}",
                    )
                ],
                "As a share of the limit, in the fullest replica.",
            ),
            Panel(
                "Cache",
                "percentunit",
                [(f'max by (model) ({_GENERATION}_cache_ratio{{model=~"$model"}})', "{{model}}")],
            ),
            Panel("Preemptions", "ops", [rate(f"{_GENERATION}_preemptions_total", "model", "version")]),
            Panel("Restarts of the engine", "ops", [rate(f"{_GENERATION}_engine_restarts_total", "model", "version")]),
        ],
        "Shadow": [
            Panel(
                "Tokens that agree",
                "percentunit",
                [
                    (
                        f'sum by (model, version) (rate({_GENERATION}_shadow_tokens_total{{model=~"$model", '
                        'agrees="true"}[5m])) / '
                        f'sum by (model, version) (rate({_GENERATION}_shadow_tokens_total{{model=~"$model"}}[5m]))',
                        "{{model}} {{version}}",
                    )
                ],
                "Of greedy answers, those before the first difference.",
            ),
            Panel(
                "Length",
                "percentunit",
                [
                    (
                        f'sum by (model, version) (rate({_GENERATION}_shadow_length_tokens_total{{model=~"$model", '
                        'side="shadow"}[5m])) / '
                        f'sum by (model, version) (rate({_GENERATION}_shadow_length_tokens_total{{model=~"$model", '
                        'side="client"}[5m]))',
                        "{{model}} {{version}}",
                    )
                ],
                "Tokens of the shadow's answers, as a share of the clients'.",
            ),
        ],
    },
    {"model": f"{_GENERATION}_running"},
)

TRAINING = Board(
    "Rayloom training",
    {
        "Progress": [
            Panel(
                "Progress",
                "percentunit",
                [('ray_rayloom_train_step{run=~"$run"} / ray_rayloom_train_steps_planned{run=~"$run"}', "{{run}}")],
            ),
            Panel("Loss", "short", [of_run("loss"), (of_run("val_loss")[0], "validation, {{run}}")]),
            Panel("Validation accuracy", "percentunit", [of_run("val_accuracy_ratio")]),
            Panel("Learning rate", "sci", [of_run("learning_rate")]),
            Panel("Gradient norm", "short", [of_run("gradient_norm")]),
            Panel("Failures of workers", "short", [("sum by (run) (ray_rayloom_train_failures_total)", "{{run}}")]),
        ],
        "Speed": [
            Panel("Samples", "ops", [of_run("samples_per_second")]),
            Panel("Tokens", "ops", [of_run("tokens_per_second")]),
            Panel("Model FLOPs utilisation", "percentunit", [of_run("mfu_ratio")]),
            Panel("Step", "s", [of_run("step_seconds")]),
            Panel(
                "Own work of each rank",
                "s",
                [of_run("rank_busy_seconds", "rank")],
                "One that is higher holds up the rest.",
            ),
            Panel("Waits for data", "percentunit", [of_run("data_stall_ratio")]),
            Panel("Communication", "percentunit", [of_run("communication_ratio")], "Only with train.profile."),
        ],
        "Memory and checkpoints": [
            Panel("Peak memory", "bytes", [of_run("memory_peak_bytes")]),
            Panel("Fragmentation on the GPU", "percentunit", [of_run("memory_fragmentation_ratio")]),
            Panel(
                "Age of the checkpoint",
                "s",
                [('time() - ray_rayloom_train_checkpoint_timestamp_seconds{run=~"$run"}', "{{run}}")],
            ),
            Panel("Writing a checkpoint", "s", [of_run("checkpoint_seconds")]),
        ],
    },
    {"run": "ray_rayloom_train_step"},
)

TUNING = Board(
    "Rayloom tuning",
    {
        "Search": [
            Panel("Trials", "short", [('ray_rayloom_tune_trials{run=~"$run"}', "{{state}}, {{run}}")]),
            Panel("Best value", "short", [('ray_rayloom_tune_best_value{run=~"$run"}', "{{metric}}, {{run}}")]),
            Panel("Epochs", "short", [('ray_rayloom_tune_epochs_total{run=~"$run"}', "{{run}}")]),
            Panel(
                "Share that was cut short",
                "percentunit",
                [
                    (
                        'sum by (run) (ray_rayloom_tune_trials{run=~"$run", state="pruned"}) / '
                        'sum by (run) (ray_rayloom_tune_trials{run=~"$run", state=~"pruned|complete|failed"})',
                        "{{run}}",
                    )
                ],
            ),
        ]
    },
    {"run": "ray_rayloom_tune_trials"},
)

_CPU = Panel("CPU", "percent", [("ray_node_cpu_utilization", "{{instance}}")])
_MEMORY = Panel("Memory", "percentunit", [("ray_node_mem_used / ray_node_mem_total", "{{instance}}")])
_NODES = Panel("Nodes", "short", [("rayloom_nodes", "{{state}}")])

NODES = Board(
    "Rayloom nodes",
    {
        "Nodes": [
            _NODES,
            _CPU,
            _MEMORY,
            Panel("Disk", "percent", [("ray_node_disk_utilization_percentage", "{{instance}}")]),
            Panel(
                "Network",
                "Bps",
                [
                    ("ray_node_network_receive_speed", "{{instance}} received"),
                    ("ray_node_network_send_speed", "{{instance}} sent"),
                ],
            ),
            Panel("Object store", "bytes", [("sum by (Location) (ray_object_store_memory)", "{{Location}}")]),
        ],
        "GPUs": [
            Panel("GPU", "percent", [("ray_node_gpus_utilization", "{{instance}} {{GpuIndex}}")]),
            Panel("GPU memory", "decmbytes", [("ray_node_gram_used", "{{instance}} {{GpuIndex}}")]),
            Panel("GPU temperature", "celsius", [("ray_node_gpu_temperature_celsius", "{{instance}} {{GpuIndex}}")]),
            Panel("GPU power", "mwatt", [("ray_node_gpu_power_milliwatts", "{{instance}} {{GpuIndex}}")]),
        ],
        "What runs": [
            Panel("Jobs", "short", [("rayloom_jobs", "{{job}} {{status}}")]),
            Panel("Actors", "short", [("sum by (State) (ray_actors)", "{{State}}")]),
            Panel(
                "Lost processes", "short", [("rayloom_actors_lost_total", "{{kind}}")], "Not those ended on purpose."
            ),
        ],
    },
    {},
)

OVERVIEW = Board(
    "Rayloom overview",
    {
        "Alerts": [
            Panel("Alerts that fire", "short", [('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts")]),
            _NODES,
            Panel("Jobs", "short", [("sum by (status) (rayloom_jobs)", "{{status}}")]),
        ],
        "Endpoint": [
            Panel("Requests", "reqps", [("sum by (model) (rayloom:requests:rate1m)", "{{model}}")]),
            Panel(
                "Latency",
                "s",
                [
                    ("rayloom:request_seconds:p50_1m", "{{model}} p50"),
                    ("rayloom:request_seconds:p99_1m", "{{model}} p99"),
                ],
            ),
            Panel("Waiting", "short", [("rayloom:waiting:sum", "{{model}}")]),
        ],
        "Training and search": [
            Panel("Loss", "short", [("ray_rayloom_train_loss", "{{run}}")]),
            Panel("Samples", "ops", [("ray_rayloom_train_samples_per_second", "{{run}}")]),
            Panel("Trials", "short", [("ray_rayloom_tune_trials", "{{state}}, {{run}}")]),
        ],
        "Nodes": [_CPU, _MEMORY],
    },
    {},
)

BOARDS = {
    "overview": OVERVIEW,
    "serving": SERVING,
    "generation": GENERATION,
    "training": TRAINING,
    "tuning": TUNING,
    "nodes": NODES,
}


def to_json(name: str, board: Board) -> str:
    """Return a dashboard as Grafana reads it."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"rayloom-{name}")
        .tags(["rayloom"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    )
    for label, metric in board.variables.items():
        built.with_variable(_variable(label, metric))
    for title, panels in board.rows.items():
        built.with_row(dashboard.Row(title))
        for panel in panels:
            built.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _variable(label: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric}, {label})")
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _panel(panel: Panel) -> timeseries.Panel:
    built = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(_SOURCE).span(_SPAN).height(_HEIGHT)
    if panel.description:
        built.description(panel.description)
    for number, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        built.with_target(query)
    return built


def main() -> None:
    """Write every dashboard."""
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(to_json(name, board), encoding="utf-8")


if __name__ == "__main__":
    main()
