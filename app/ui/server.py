"""The server behind ``rayloom ui``: it reads storage, and writes nothing."""

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from upath import UPath

from app.errors import ClusterError, RayloomError, StorageError, UnauthorizedError
from app.pages.assets import page_headers
from app.pages.page import REPORT_FILE, Page
from app.ports import family_of, host_port
from app.reports.catalog import RunSummary, compare_runs, find_run, list_runs
from app.reports.report import page_of
from app.reports.run_folder import RunFolder
from app.repository.repository import Repository
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
from app.shared_files import read
from app.ui.pages import Site

_COOKIE = "rayloom_token"
_MAX_FORM_BYTES = 4096
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

    def site(request: Request) -> Site:
        home = "../" * (request.url.path.count("/") - 1) or "./"
        return Site(storage, access.token_sha256 is not None, home)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            if request.url.path not in ("/login", "/logout"):
                _check_token(request, access)
            return await answer(request)
        except UnauthorizedError as error:
            has_token = _COOKIE in request.cookies or "authorization" in request.headers
            return _html(site(request).login(error if has_token else None), 401)

    if is_loopback(host):
        app.add_middleware(LocalOnly)

    @app.post("/login")
    async def login(request: Request) -> Response:
        token = await _token_in(request)
        access.check(Caller(f"Bearer {token}"))
        response = RedirectResponse("./", 303)
        response.set_cookie(_COOKIE, token, httponly=True, samesite="lax", secure=request.url.scheme == "https")
        return response

    @app.post("/logout")
    def logout() -> Response:
        response = RedirectResponse("./", 303)
        response.delete_cookie(_COOKIE)
        return response

    _add_refusals(app, storage, site)
    _add_pages(app, storage, site)
    return app


def _add_refusals(app: FastAPI, storage: UPath, site: Callable[[Request], Site]) -> None:
    @app.exception_handler(RayloomError)
    def refuse(request: Request, error: RayloomError) -> Response:
        if isinstance(error, UnauthorizedError):
            return _html(site(request).login(error), 401)
        return _html(site(request).refusal(error), 404 if isinstance(error, StorageError) else 400)

    @app.exception_handler(OSError)
    def report_storage(request: Request, error: OSError) -> Response:
        told = StorageError(f"storage {str(storage)!r} cannot be read ({error}): check its rights").of(
            "storage.unreadable", "storage"
        )
        return _html(site(request).refusal(told), 503)


def _add_pages(app: FastAPI, storage: UPath, site: Callable[[Request], Site]) -> None:
    ended: dict[str, RunSummary] = {}
    """Summaries of runs that have succeeded, which nothing changes any more."""

    @app.get("/")
    def runs(request: Request, job: str = "", recipe: str = "", limit: int = 200) -> Response:
        listed = list_runs(storage, job or None, recipe.strip() or None, limit, ended)
        ended.update((run.key, run) for run in listed if run.status == "succeeded")
        return _html(site(request).runs(listed, job, recipe))

    @app.get("/models")
    def models(request: Request) -> Response:
        return _html(site(request).models(Repository(storage).list_versions()))

    @app.get("/compare")
    def compare(request: Request, run: Annotated[list[str], Query()] = []) -> Response:  # noqa: B006 # never changed
        oldest_first = sorted(run, key=lambda named: named.rpartition("/")[2])
        return _html(site(request).comparison(compare_runs(storage, oldest_first)))

    @app.get(f"/runs/{{job}}/{{run_id}}/{REPORT_FILE}")
    def report(job: str, run_id: str) -> HTMLResponse:
        return HTMLResponse(_report_of(find_run(storage, f"{job}/{run_id}")), headers=_REPORT_HEADERS)


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
        listener = socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        raise ClusterError(
            f"{host_port(host, port)} cannot be listened on ({error.strerror}): choose another --port"
        ).of("port.unusable", "--port") from error
    print(f"runs and models of {storage} are at http://{host_port(host, listener.getsockname()[1])}/", flush=True)
    if token_file:
        print(f"the page asks for the token in {token_file}", flush=True)
    config = uvicorn.Config(create_app(storage, access, host), log_level="warning", server_header=False)
    uvicorn.Server(config).run([listener])


def _check_token(request: Request, access: Access) -> None:
    cookie = request.cookies.get(_COOKIE)
    caller = Caller.of(headers_of(request.scope))
    access.check(caller._replace(authorization=f"Bearer {cookie}") if cookie and not caller.authorization else caller)


async def _token_in(request: Request) -> str:
    """Return the token in the form that is sent. Raises UnauthorizedError if it is longer than any token."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MAX_FORM_BYTES:
            raise UnauthorizedError(f"the form has more than {_MAX_FORM_BYTES:,} bytes: expected the token alone")
    return parse_qs(content.decode(errors="replace")).get("token", [""])[0].strip()


def _html(page: Page, status: int = 200) -> HTMLResponse:
    html = page.to_html()
    return HTMLResponse(html, status, page_headers(html, has_forms=True))


def _report_of(run: RunFolder) -> bytes:
    """Return the page of a run. While the run goes on, it is made anew."""
    written = read(run.path / REPORT_FILE) if run.result else None
    return written or page_of(run.path).to_html().encode()
