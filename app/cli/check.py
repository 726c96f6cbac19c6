"""The command ``rayloom check``."""

from dataclasses import asdict
from typing import Annotated

import typer

from app.cli.options import Json, Storage, chosen_storage
from app.cli.tables import print_json
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
    as_json: Json = False,
) -> None:
    """Check targets of runs and models, and print pass or fail with the figure. The exit code is 1 if one fails."""
    cluster = read_state()
    url = prometheus_url or (cluster.monitoring.prometheus_url if cluster and cluster.monitoring else None)
    found = findings(chosen_storage(storage), subject, prometheus(url) if url else None)
    if as_json:
        print_json([asdict(finding) | {"passes": finding.passes} for finding in found])
    for finding in found if not as_json else ():
        print(finding)
    # A target that was not measured, None, is no failure.
    if any(finding.passes is False for finding in found):
        raise typer.Exit(1)
