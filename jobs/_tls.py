"""TLS, as far as the cluster's ingress has it."""

import os
import ssl
import tempfile
from pathlib import Path

from app.cluster.haproxy import TLS_FILE
from app.config import TlsConfig
from app.errors import ClusterError


def require_possible(tls: TlsConfig) -> None:
    """Refuse TLS that the ingress could not speak.

    Raises:
        ClusterError: Ray starts HAProxy, without TLS; or the files are no certificate and its key.
    """
    if _has_haproxy() and TLS_FILE not in os.environ:
        raise ClusterError(
            "serve.tls is given, and this cluster's ingress is HAProxy as Ray starts it, without TLS: put a proxy that "
            "ends TLS in front of the endpoint, set serve.auth to token and leave serve.tls out; or start the cluster "
            "with 'rayloom up', or with RAY_SERVE_ENABLE_HA_PROXY=0, whose ingress is slower and speaks TLS"
        )
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate, tls.key, password="")
    except OSError as error:  # an SSLError is one
        raise ClusterError(
            f"serve.tls: {tls.certificate!r} and {tls.key!r} cannot be loaded ({error}): expected a certificate and "
            "its key in PEM, the key without a password"
        ) from error


def serve_options(tls: TlsConfig | None) -> dict[str, str]:
    """What Serve's HTTP options say of it: nothing with HAProxy, which asks the replicas in the clear."""
    return {} if tls is None or _has_haproxy() else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}


def show_to_haproxy(tls: TlsConfig | None) -> None:
    """Let HAProxy, if it is the ingress, show this certificate from its next start on, which every deploy brings.

    Without one it speaks no TLS.
    """
    if not _has_haproxy() or TLS_FILE not in os.environ:
        return
    place = Path(os.environ[TLS_FILE])
    if tls is None:
        place.unlink(missing_ok=True)
    else:
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:  # of mode 600
            file.write(b"\n".join(Path(part).read_bytes() for part in (tls.certificate, tls.key)))
        os.replace(file.name, place)


def haproxy_speaks_tls() -> bool:
    """Whether it has been shown a certificate."""
    return _has_haproxy() and Path(os.environ.get(TLS_FILE, "")).is_file()


def _has_haproxy() -> bool:
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
