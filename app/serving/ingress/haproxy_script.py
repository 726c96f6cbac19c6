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
from app.serving.ingress.pool_routes import grpc_rules, http_rules
from app.serving.pools import APPLICATION

_RECEIVE_TIMEOUT_S = 30
"""Time to receive the headers of a request, and then its body. Replicas wait as long for a body."""
_KEEP_ALIVE_S = 1
"""HAProxy finds a replaced replica down after two checks, 2 to 4 s after it begins to drain."""
SILENCE_S = 7
"""How long a machine may acknowledge nothing before it counts as lost.

HAProxy has found each of its replicas down by then, with two checks that take 2 s each and begin within 2 s. So nothing
that is tried again goes to another one of them.
"""
_KEEP_ALIVE_PROBES = f"option srvtcpka\\n    srvtcpka-idle {SILENCE_S - 2}s\\n    srvtcpka-intvl 1s"
"""HAProxy's options for probes of a connection on which nothing is sent. The machine's kernel answers them."""
_WAIT_FOR_BODY = f"http-request wait-for-body time {_RECEIVE_TIMEOUT_S}s"
_IS_SHORT = "{ req.hdr_val(content-length) lt 16384 } !{ req.hdr(expect) -m found }"
"""HAProxy's condition for a body that fits into its buffer, and that the client sends without being asked for it."""
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
    POOLS = "there are other pools than the shared one"
    SEVERAL = "several applications have replicas that listen for gRPC, and one of them is the shared pool"
    GRPC = "the application has replicas that listen for HTTP and gRPC"
    TLS = "the certificate's file exists"


@dataclass(frozen=True)
class Edit:
    """An expression of sed, and why it is needed."""

    expression: str
    why: str


@dataclass(frozen=True)
class Files:
    """The files that HAProxy reads."""

    no_answer: Path
    """An HTTP response that tells a client to try again later."""
    too_slow: Path
    """An HTTP response for a client that takes too long to send its request."""
    tls: Path
    """A certificate and its key. While the file is missing, clients do not speak TLS."""
    pools: Path
    """An empty file, by which HAProxy's map of pools is named."""


def edits(files: Files) -> dict[When, tuple[Edit, ...]]:
    """Return all edits of Ray's configuration."""
    http = http_rules(files.pools, _WAIT_FOR_BODY)
    grpc = grpc_rules(files.pools, _WAIT_FOR_BODY, _SERVICE)
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
                rf"s|^\(  *errorfile [0-9]*\) .*|\1 {files.no_answer}|",
                "a request that no replica answers may be sent again; Ray would say that the server is broken",
            ),
            Edit(rf"s|^defaults.*|&\n    errorfile 408 {files.too_slow}|", "this error is JSON, too"),
            Edit(
                f"s|^frontend http_frontend$|&\\n    http-request return {_NOT_HERE} if {{ path_beg {_SERVICE} }}|",
                "gRPC calls have their own port, to which no web page can send them",
            ),
            Edit(
                rf"s|^defaults.*|&\n    timeout http-request {_RECEIVE_TIMEOUT_S}s|",
                "a client that never ends its headers does not keep a connection",
            ),
            Edit(
                r"s|^defaults.*|&\n    option http-ignore-probes|",
                "browsers connect ahead of time: a connection without a request gets no error",
            ),
            Edit(r"s|^defaults.*|&\n    option dontlog-normal|", "only failures are logged"),
            Edit(
                r"/^  *option splice-request$/d",
                "with it, a client that goes away before its answer is not noticed if its body came after its headers",
            ),
            Edit(
                rf"s|^defaults.*|&\n    timeout http-keep-alive {_KEEP_ALIVE_S}s|",
                "a connection that idles during a deployment would stay with a HAProxy that knows only old replicas",
            ),
            Edit(
                rf"s|^defaults.*|&\n    {_KEEP_ALIVE_PROBES}|",
                "a machine that loses its power closes no connection, and an answer under way would be awaited forever",
            ),
            Edit(
                rf"s|^  *server [^ ]* [^ ]*|& tcp-ut {SILENCE_S}s|",
                "so would one to what is sent on a connection to such a machine; probes wait while something is sent",
            ),
            Edit(
                rf"s|^backend http-{APPLICATION}\(-.*\)*$|&\n    {_WAIT_FOR_BODY} if {_IS_SHORT}|",
                "only a request that HAProxy holds as a whole is sent again to another replica",
            ),
        ),
        When.POOLS: (
            _after("frontend http_frontend", http.lines, "a request names a model, not its pool"),
            _before("    # Static routing", http.choice, "no hop over a replica of the shared pool"),
            _after("frontend grpc_frontend", grpc.lines, "a call names a model, not its pool"),
            _before("    # Route per-app", grpc.choice, "no hop over a replica of the shared pool"),
        ),
        When.SEVERAL: (
            Edit(
                f"s|^    default_backend default_grpc_backend$|    default_backend grpc-{APPLICATION}|",
                "clients of the Open Inference Protocol name no application of Serve",
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
                f"/^frontend [a-z]*_frontend/,/^    bind /s|^    bind .*|& ssl crt {files.tls}|",
                "clients of both protocols speak TLS; Ray has no setting for HAProxy's",
            ),
        ),
    }


def _after(line: str, added: Sequence[str], why: str) -> Edit:
    return Edit("".join([f"s|^{line}$|&", *(f"\\n    {one}" for one in added), "|"]), why)


def _before(beginning: str, added: str, why: str) -> Edit:
    return Edit(f"s|^{beginning}.*|    {added}\\n&|", why)


_NAME = "APPLICATION"
"""Stands for the name of each application in the next expressions."""

UNARY_BACKEND = (
    Edit(f"/^backend http-{_NAME}$/,/^[a-z]/!d", "only the replicas' HTTP listeners"),
    Edit(
        f"s/^backend http-{_NAME}$/backend unary-{_NAME}\\n    {_WAIT_FOR_BODY}/p",
        "under another name, with bodies that have no announced length",
    ),
    Edit("/ backup$/d", "without Serve's own proxy, which takes no gRPC on its HTTP port"),
    Edit(
        rf"s|^\(  *server \([^ ]*\) [^ ]* tcp-ut [^ ]*\) .*|\1 track http-{_NAME}/\2|p",
        "each replica, as healthy as HAProxy has found it for HTTP",
    ),
    Edit(r"/^  *timeout\|^  *http-reuse\|^  *log/p", "with the same settings"),
)
"""These print, from Ray's configuration, a backend for the unary calls of an application."""


def write_script(path: Path, haproxy: str, files: Files) -> None:
    """Write the script that starts the binary ``haproxy``."""
    programs = {when: _program(group) for when, group in edits(files).items()}
    script = _SCRIPT.format(
        starting=programs[When.STARTING],
        always=programs[When.ALWAYS],
        pools=programs[When.POOLS],
        several=programs[When.SEVERAL],
        grpc=programs[When.GRPC],
        add_tls=programs[When.TLS],
        unary_backend=_program(UNARY_BACKEND),
        application=APPLICATION,
        tls=shlex.quote(str(files.tls)),
        haproxy=shlex.quote(haproxy),
    )
    path.write_text(script, encoding="utf-8")
    path.chmod(0o700)


def _program(group: Sequence[Edit]) -> str:
    """Return the arguments by which sed makes all edits of a group."""
    return " \\\n    ".join(f"-e {quoted(edit)}" for edit in group)


def quoted(edit: Edit) -> str:
    """Return the expression of an edit as it stands in the script."""
    return shlex.quote(edit.expression).replace(_NAME, """'"$application"'""")


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
applications=$(sed -n 's/^backend http-\\({application}[a-z0-9-]*\\)$/\\1/p' "$3")
if echo "$applications" | grep -q '^{application}-'; then
    sed -i {pools} "$3"
fi
if grep -q '^backend grpc-{application}$' "$3"; then
    sed -i {several} "$3"
fi
if grep -q '^    default_backend grpc-{application}$' "$3"; then
    for application in $applications; do
        sed -n {unary_backend} "$3" > "$3.unary"
        if grep -q '^  *server ' "$3.unary"; then
            if [ "$application" = {application} ]; then
                sed -i {grpc} "$3"
            fi
            cat "$3.unary" >> "$3"
        fi
    done
fi
if grep -q '^backend grpc-{application}$' "$3" && ! grep -q '^    use_backend unary-{application} ' "$3"; then
    echo "no HTTP listener of {application} was found: all gRPC calls go to gRPC listeners, which need more CPU" >&2
fi
if [ -f {tls} ]; then
    sed -i {add_tls} "$3"
fi
exec {haproxy} "$@"
"""
