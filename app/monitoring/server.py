"""The process that watches a cluster for Prometheus, and shows its dashboards: python -m app.monitoring.server

It answers this machine on loopback, without a token: ``/metrics`` for Prometheus, ``/monitoring`` for a browser.
"""

import argparse
import json
from typing import Any

import httpx
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from app.best_effort import repeat_in_background
from app.cluster.jobs import JobsApi
from app.cluster.state import running_cluster
from app.monitoring.configuration import DASHBOARDS, FILES
from app.monitoring.exporter import ClusterWatch
from app.ports import LOOPBACK
from app.serving.access import LocalOnly

_LOOK_INTERVAL_S = 3.0
_TIMEOUT_S = 30.0
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
# Only requests that read, because this page needs no token.
_QUERIES = ("query", "query_range", "alerts")
"""What of Prometheus' API the page asks."""


def dashboards() -> dict[str, dict[str, Any]]:
    """Return Grafana's dashboards by their names, the overview first."""
    boards = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (FILES / DASHBOARDS).glob("*.json")}
    return dict(sorted(boards.items(), key=lambda named: (named[0] != "overview", named[0])))


def create_app(watch: ClusterWatch, prometheus: str) -> Starlette:
    """Return the application. ``prometheus`` is the URL of the server that the page shows figures of."""
    registry = CollectorRegistry()
    registry.register(watch)
    client = httpx.AsyncClient(base_url=prometheus, timeout=_TIMEOUT_S)
    page = (FILES / "page.html").read_text(encoding="utf-8")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def monitoring(_: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    async def boards(_: Request) -> Response:
        return JSONResponse(dashboards())

    async def ask(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _QUERIES:
            return JSONResponse({"error": f"{name!r} is not asked here: only {', '.join(_QUERIES)}"}, 404)
        try:
            answer = await client.get(f"/api/v1/{name}", params=dict(request.query_params))
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"Prometheus does not answer at {prometheus}: {error!r}"}, 502)
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def home(_: Request) -> Response:
        return RedirectResponse("/monitoring")

    return Starlette(
        routes=[
            Route("/", home),
            Route("/metrics", metrics),
            Route("/monitoring", monitoring),
            Route("/dashboards", boards),
            Route("/api/v1/{name}", ask),
        ],
        middleware=[Middleware(LocalOnly)],
    )


def main() -> None:
    """Watch the cluster of ``RAYLOOM_HOME`` until this process is ended."""
    parser = argparse.ArgumentParser(prog="python -m app.monitoring.server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus", required=True, help="URL")
    arguments = parser.parse_args()
    watch = ClusterWatch(JobsApi.of(running_cluster().client_environment()))
    with repeat_in_background(watch.look, _LOOK_INTERVAL_S, name="watch"):
        uvicorn.run(create_app(watch, arguments.prometheus), host=LOOPBACK, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
