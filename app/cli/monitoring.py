"""The command that writes the configuration of Prometheus, Alertmanager and Grafana."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from app.best_effort import warn
from app.cluster.state import TOKEN_FILE, read_state
from app.config import NotifyConfig, load_recipe
from app.errors import ClusterError
from app.monitoring.configuration import ALERTMANAGER_FILE, PROMETHEUS_FILE, Targets, write_configuration
from app.monitoring.processes import targets_of

Notify = Annotated[
    str | None, typer.Option(help="A recipe, whose 'notify' section names who is told of alerts. Default: nobody.")
]
_DEFAULT = "Default: that of the local cluster if it is monitored, else 127.0.0.1:"


def receivers_of(recipe: str | None) -> NotifyConfig:
    """Return the receivers that a recipe names. Raises RecipeError."""
    notify = load_recipe(recipe, []).notify if recipe else NotifyConfig()
    if notify.apprise:
        warn("Alertmanager does not know notify.apprise: these services get a recipe's own alerts alone")
    return notify


def write_files(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    dashboard: Annotated[
        str | None, typer.Option(help="Ray's dashboard as a URL. Default: the local cluster's.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="The cluster's token, where Prometheus reads it. Default: the local cluster's.")
    ] = None,
    prometheus: Annotated[str | None, typer.Option(help=f"Where Prometheus will listen. {_DEFAULT}9090.")] = None,
    alertmanager: Annotated[str | None, typer.Option(help=f"Where Alertmanager will listen. {_DEFAULT}9093.")] = None,
    exporter: Annotated[
        str | None, typer.Option(help=f"Where app.monitoring.server will listen. {_DEFAULT}9187.")
    ] = None,
    notify: Notify = None,
) -> None:
    """Write the configuration of Prometheus, Alertmanager and Grafana for a cluster, with its ports."""
    local = read_state()
    if dashboard is None and local is None:
        raise ClusterError(
            "no local cluster is up: start one with 'rayloom up', or give --dashboard and --token-file"
        ).of("cluster.none")
    if dashboard is None and local and local.monitoring:
        targets = targets_of(local)
    else:
        address = dashboard or (local.dashboard if local else "")
        targets = Targets(address, TOKEN_FILE)
    targets = replace(
        targets,
        token_file=token_file or targets.token_file,
        prometheus=prometheus or targets.prometheus,
        alertmanager=alertmanager or targets.alertmanager,
        exporter=exporter or targets.exporter,
    )
    write_configuration(folder, targets, receivers_of(notify))
    for name in (PROMETHEUS_FILE, ALERTMANAGER_FILE):
        print(folder / name)
