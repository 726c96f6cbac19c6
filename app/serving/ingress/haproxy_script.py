"""The script that Ray Serve starts as HAProxy. It edits the configuration that Ray has written, then starts HAProxy.

Ray has no setting for what is edited. The edits match text of Ray's own template, so a test renders the template of
the installed Ray, and fails for an edit that changes nothing: ``tests/unit/serving/test_haproxy.py``.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from app.ports import LOOPBACK

APPLICATION = "rayloom"
"""The Ray Serve application that HAProxy sends requests to."""
_HEADERS_TIMEOUT_S = 30
_KEEP_ALIVE_S = 1
"""HAProxy finds a replaced replica down after two checks, 2 to 4 s after it begins to drain."""
_SERVICE = "/inference.GRPCInferenceService/"
_IS_UNARY = f"{{ path_beg {_SERVICE} }} !{{ path {_SERVICE}ModelStreamInfer }} {{ nbsrv(unary-{APPLICATION}) ge 1 }}"
"""HAProxy's condition for unary calls: the call is unary, and at least one replica is up."""
_NOT_HERE = (
    "status 404 content-type application/json string "
    """'{"error":"this port does not accept gRPC: send calls to serve.grpc_port"}'"""
)
"""HAProxy's answer to a gRPC path on the HTTP port."""


class When(StrEnum):
    """In which configurations an edit finds something to change."""

    ALWAYS = "always"
    STARTING = "no replica has been known to HAProxy yet"
    GRPC = "the application has replicas that listen for HTTP and gRPC"
    TLS = "the certificate's file exists"


@dataclass(frozen=True)
class Edit:
    """An expression of sed, and why it is needed."""

    expression: str
    why: str


def edits(no_answer: Path, tls: Path) -> dict[When, tuple[Edit, ...]]:
    """Return all edits of Ray's configuration.

    Args:
        no_answer: file with the HTTP response that tells a client to try again later.
        tls: file of a certificate and its key.
    """
    return {
        When.STARTING: (
            Edit(
                r"s/^\(  *http-request return status\) 404 .*/\1 503 default-errorfiles/",
                "a path is not unknown, only because no replica is known yet",
            ),
        ),
        When.ALWAYS: (
            Edit(rf"s/^  bind \*:/  bind {LOOPBACK}:/", "the page of statistics is for this machine alone"),
            Edit(rf"s/^    bind :/    bind {LOOPBACK}:/", "the page of metrics is for this machine alone"),
            Edit("s/ mode 666 / mode 600 /", "HAProxy's socket takes commands: of this user alone"),
            Edit(
                rf"s|^\(  *errorfile [0-9]*\) .*|\1 {no_answer}|",
                "a request that no replica answers may be sent again; Ray would say that the server is broken",
            ),
            Edit(
                f"s|^frontend http_frontend$|&\\n    http-request return {_NOT_HERE} if {{ path_beg {_SERVICE} }}|",
                "gRPC calls have their own port, to which no web page can send them",
            ),
            Edit(
                rf"s|^defaults.*|&\n    timeout http-request {_HEADERS_TIMEOUT_S}s|",
                "a client that never ends its headers does not keep a connection",
            ),
            Edit(
                r"s|^defaults.*|&\n    option http-ignore-probes|",
                "browsers connect ahead of time: a connection without a request gets no error",
            ),
            Edit(r"s|^defaults.*|&\n    option dontlog-normal|", "only failures are logged"),
            Edit(
                rf"s|^defaults.*|&\n    timeout http-keep-alive {_KEEP_ALIVE_S}s|",
                "a connection that idles during a deployment would stay with a HAProxy that knows only old replicas",
            ),
        ),
        When.GRPC: (
            Edit(
                f"s|^    default_backend grpc-{APPLICATION}$|    use_backend unary-{APPLICATION} if {_IS_UNARY}\\n&|",
                "unary calls go to the HTTP listeners, which need less CPU; streams stay",
            ),
        ),
        When.TLS: (
            Edit(
                f"/^frontend [a-z]*_frontend/,/^    bind /s|^    bind .*|& ssl crt {tls}|",
                "clients of both protocols speak TLS; Ray has no setting for HAProxy's",
            ),
        ),
    }


UNARY_BACKEND = (
    Edit(f"/^backend http-{APPLICATION}$/,/^[a-z]/!d", "only the replicas' HTTP listeners"),
    Edit(f"s/^backend http-{APPLICATION}$/backend unary-{APPLICATION}/p", "under another name"),
    Edit("/ backup$/d", "without Serve's own proxy, which takes no gRPC on its HTTP port"),
    Edit(
        rf"s|^\(  *server \([^ ]*\) [^ ]*\) .*|\1 track http-{APPLICATION}/\2|p",
        "each replica, as healthy as HAProxy has found it for HTTP",
    ),
    Edit(r"/^  *timeout\|^  *http-reuse\|^  *log/p", "with the same settings"),
)
"""These print, from Ray's configuration, a backend for unary calls."""


def write_script(path: Path, haproxy: str, no_answer: Path, tls: Path) -> None:
    """Write the script that starts the binary ``haproxy``. The other arguments are those of ``edits``."""
    programs = {when: _program(group) for when, group in edits(no_answer, tls).items()}
    script = _SCRIPT.format(
        starting=programs[When.STARTING],
        always=programs[When.ALWAYS],
        grpc=programs[When.GRPC],
        add_tls=programs[When.TLS],
        unary_backend=_program(UNARY_BACKEND),
        application=APPLICATION,
        tls=shlex.quote(str(tls)),
        haproxy=shlex.quote(haproxy),
    )
    path.write_text(script, encoding="utf-8")
    path.chmod(0o700)


def _program(group: Sequence[Edit]) -> str:
    """Return the arguments by which sed makes all edits of a group."""
    return " \\\n    ".join(f"-e {shlex.quote(edit.expression)}" for edit in group)


# Ray passes -db -f FILE as the first arguments. It writes FILE before every start.
_SCRIPT = """\
#!/bin/sh
# Start HAProxy with Ray Serve's configuration, "$3", edited. app/serving/ingress/haproxy_script.py says why.
if [ "$1 $2" != "-db -f" ]; then
    echo "Ray starts HAProxy with other arguments than -db -f FILE: $*" >&2
    exit 64
fi
# After HAProxy has died, Ray does not know the replicas at once. Until then, those of before are tried.
if grep -q '^backend http-' "$3"; then
    cp "$3" "$3.last"
elif [ -f "$3.last" ]; then
    cp "$3.last" "$3"
else
    sed -i {starting} "$3"
fi
sed -i {always} "$3"
if grep -q '^    default_backend grpc-{application}$' "$3"; then
    sed -n {unary_backend} "$3" > "$3.unary"
    if grep -q '^  *server ' "$3.unary"; then
        sed -i {grpc} "$3"
        cat "$3.unary" >> "$3"
    fi
fi
if grep -q '^backend grpc-{application}$' "$3" && ! grep -q '^    use_backend unary-{application} ' "$3"; then
    echo "no HTTP listener of {application} was found: all gRPC calls go to gRPC listeners, which need more CPU" >&2
fi
if [ -f {tls} ]; then
    sed -i {add_tls} "$3"
fi
exec {haproxy} "$@"
"""
