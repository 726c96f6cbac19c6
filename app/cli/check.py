"""The command ``rayloom check``."""

from typing import Annotated

import typer

from app.cli.options import Storage, chosen_storage
from app.cluster.state import read_state
from app.monitoring.check import findings, prometheus


def check(
    subject: Annotated[
        str | None, typer.Argument(metavar="[RUN|MODEL]", help="Default: the newest run and search, and all models.")
    ] = None,
    storage: Storage = None,
    prometheus_url: Annotated[
        str | None, typer.Option("--prometheus", help="Its URL. Default: that of the local cluster, if it is watched.")
    ] = None,
) -> None:
    """Check targets of runs and models, and print pass or fail with the figure. The exit code is 1 if one fails."""
    cluster = read_state()
    url = prometheus_url or (cluster.monitoring.prometheus_url if cluster and cluster.monitoring else None)
    found = findings(chosen_storage(storage), subject, prometheus(url) if url else None)
    for finding in found:
        print(finding)
    # A target that was not measured, None, is no failure.
    if any(finding.passes is False for finding in found):
        raise typer.Exit(1)
