"""The command ``rayloom plan``."""

from typing import Annotated

import typer

from app.cli.options import Json, Overrides
from app.config import load_recipe
from app.config.overrides import require_once


def plan(
    recipe: Annotated[str, typer.Argument(help="Path or URI of a recipe. - is standard input.")],
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Such as 64xa100-80, 8x4xh100 (nodes, devices of each) or 2xcpu; or a YAML or JSON file. Default: "
            "the recipe's workers on this machine's CPUs."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of a device's hour, in any currency.")] = None,
    as_json: Json = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and a few steps of the best plans first.")
    ] = False,
) -> None:
    """Find the fastest parallel plans of a recipe on a cluster: time, memory, communication and price."""
    from app.planner.cluster import cluster_of, this_machine
    from app.training.planning.recipe import Options, plan_recipe  # slow: it imports torch

    require_once(overrides or [])
    loaded = load_recipe(recipe, overrides or [])
    workers, threads = loaded.train.workers_range[1], loaded.train.threads
    chosen = cluster_of(cluster, threads) if cluster else this_machine(workers, threads)
    found = plan_recipe(loaded, chosen, Options(top, price, calibrate))
    print(found.model_dump_json(indent=1) if as_json else found.to_text())
