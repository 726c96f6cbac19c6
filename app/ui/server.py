"""The server behind ``rayloom ui``: it reads storage, and writes nothing."""

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from upath import UPath

from app.conditional import read
from app.errors import ClusterError, RayloomError, StorageError, UnauthorizedError
from app.pages.assets import page_headers
from app.pages.page import REPORT_FILE
from app.reports.report import has_page, page_of
from app.reports.run_folder import RunFolder
from app.serving.access import (
    ENDPOINT_TOKEN_FILE,
    Access,
    Caller,
    LocalOnly,
    headers_of,
    is_loopback,
    make_token,
    read_token,
)
from app.ui.assets import PAGE
from app.ui.storage_view import ComparedRuns, ListedRun, ListedVersion, RunCurves, RunDetails, StorageView

_COOKIE = "rayloom_token"
_REPORT_HEADERS = {
    # A report has its script inline. In a sandbox it can ask neither this server nor another one.
    "content-security-policy": "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def create_app(storage: UPath, access: Access, host: str) -> FastAPI:
    """Return the application. With ``access`` by token, a browser keeps the token in a cookie that scripts cannot read.

    Without a token it answers only requests that name this machine, so that no other site's page can ask it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    view = StorageView(storage)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            if request.url.path not in ("/", "/login", "/logout"):
                _check_token(request, access)
            return await answer(request)
        except UnauthorizedError as error:
            return JSONResponse({"error": str(error)}, 401)

    if is_loopback(host):
        app.add_middleware(LocalOnly)

    @app.exception_handler(RayloomError)
    def refuse(request: Request, error: RayloomError) -> JSONResponse:  # noqa: ARG001 # FastAPI passes it
        return JSONResponse({"error": str(error)}, 404 if isinstance(error, StorageError) else 400)

    @app.exception_handler(OSError)
    def report_storage(request: Request, error: OSError) -> JSONResponse:  # noqa: ARG001 # FastAPI passes it
        return JSONResponse({"error": f"storage {str(storage)!r} cannot be read ({error}): check its rights"}, 503)

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=page_headers(PAGE))

    @app.post("/login")
    def login(request: Request) -> Response:
        access.check(caller := Caller.of(headers_of(request.scope)))
        response = JSONResponse({})
        token = (caller.authorization or "").partition(" ")[2].strip()
        response.set_cookie(_COOKIE, token, httponly=True, samesite="lax", secure=request.url.scheme == "https")
        return response

    @app.post("/logout")
    def logout() -> Response:
        response = JSONResponse({})
        response.delete_cookie(_COOKIE)
        return response

    _add_api(app, view, access)
    return app


def _add_api(app: FastAPI, view: StorageView, access: Access) -> None:
    @app.get("/api")
    def about() -> dict[str, Any]:
        return {"storage": str(view.storage), "asks_for_token": access.token_sha256 is not None}

    @app.get("/api/runs")
    def runs(job: str | None = None, recipe: str | None = None, limit: int = 200) -> list[ListedRun]:
        return view.runs(job, recipe, limit)

    @app.get("/api/runs/{job}/{run_id}")
    def run(job: str, run_id: str) -> RunDetails:
        return view.run(f"{job}/{run_id}")

    @app.get("/api/runs/{job}/{run_id}/curves")
    def curves(job: str, run_id: str) -> RunCurves:
        return view.curves(f"{job}/{run_id}")

    @app.get("/api/compare")
    def compare(run: Annotated[list[str], Query()]) -> ComparedRuns:
        return view.compare(run)

    @app.get("/api/models")
    def models() -> list[ListedVersion]:
        return view.models()

    @app.get(f"/runs/{{job}}/{{run_id}}/{REPORT_FILE}")
    def report(job: str, run_id: str) -> HTMLResponse:
        return HTMLResponse(_report_of(view.find(f"{job}/{run_id}")), headers=_REPORT_HEADERS)


def serve_ui(storage: UPath, host: str, port: int, token_file: Path | None) -> None:
    """Serve until the process is interrupted. On loopback everybody is answered, elsewhere whoever shows the token.

    Raises:
        ClusterError: the token's file cannot be read or made, or the address cannot be listened on.
    """
    if token_file:
        access = Access.by_token(read_token(token_file))
    elif is_loopback(host):
        access = Access()
    else:
        token_file = ENDPOINT_TOKEN_FILE
        access = Access.by_token(make_token(token_file))
    try:
        listener = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise ClusterError(f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port") from error
    address = f"[{host}]" if ":" in host else host
    print(f"runs and models of {storage} are at http://{address}:{listener.getsockname()[1]}/", flush=True)
    if token_file:
        print(f"the page asks for the token in {token_file}", flush=True)
    config = uvicorn.Config(create_app(storage, access, host), log_level="warning", server_header=False)
    uvicorn.Server(config).run([listener])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _check_token(request: Request, access: Access) -> None:
    cookie = request.cookies.get(_COOKIE)
    caller = Caller.of(headers_of(request.scope))
    access.check(caller._replace(authorization=f"Bearer {cookie}") if cookie and not caller.authorization else caller)


def _report_of(run: RunFolder) -> bytes:
    """Return the page of a run. While the run goes on, it is made anew."""
    if has_page(run.job) and run.result is None:
        return page_of(run.path).to_html().encode()
    content = read(run.path / REPORT_FILE)
    if content is not None:
        return content
    if has_page(run.job):
        return page_of(run.path).to_html().encode()
    raise StorageError(f"run {run.run_id} has no {REPORT_FILE}: it is written when the run ends")
