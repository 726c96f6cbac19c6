"""TLS at the cluster's ingress."""

import os
import ssl
import tempfile
from pathlib import Path

from app.config import TlsConfig
from app.errors import ClusterError
from app.serving.ingress.haproxy import TLS_FILE


def require_possible(tls: TlsConfig) -> None:
    """Check that the ingress supports TLS with this certificate.

    Raises:
        ClusterError: Ray itself starts HAProxy, which is then without TLS, or the files are not a certificate and its
            key.
    """
    if _has_haproxy() and TLS_FILE not in os.environ:
        raise ClusterError(
            "serve.tls is given, and this cluster's ingress is HAProxy as Ray starts it, without TLS: put a proxy that "
            "ends TLS in front of the endpoint, set serve.auth to token and leave serve.tls out; or start the cluster "
            "with 'rayloom up', or with RAY_SERVE_ENABLE_HA_PROXY=0, whose ingress is slower and speaks TLS"
        ).of("tls.no_proxy", "serve.tls")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate, tls.key, password="")
    except OSError as error:  # SSLError is a subclass
        raise ClusterError(
            f"serve.tls: {tls.certificate!r} and {tls.key!r} cannot be loaded ({error}): expected a certificate and "
            "its key in PEM, the key without a password"
        ).of("tls.unreadable", "serve.tls") from error


def serve_options(tls: TlsConfig | None) -> dict[str, str]:
    """Return Serve's HTTP options for TLS. With HAProxy there are none: it connects to the replicas without TLS."""
    return {} if tls is None or _has_haproxy() else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}


def give_to_haproxy(tls: TlsConfig | None) -> None:
    """Give HAProxy, if it is the ingress, a certificate for its next start. Every deploy restarts HAProxy.

    Without a certificate it uses no TLS.
    """
    if not _has_haproxy() or TLS_FILE not in os.environ:
        return
    file_path = Path(os.environ[TLS_FILE])
    if tls is None:
        file_path.unlink(missing_ok=True)
    else:
        with tempfile.NamedTemporaryFile(dir=file_path.parent, delete=False) as file:  # with mode 600
            file.write(b"\n".join(Path(part).read_bytes() for part in (tls.certificate, tls.key)))
        os.replace(file.name, file_path)


def haproxy_speaks_tls() -> bool:
    """Return whether HAProxy is the ingress and has a certificate."""
    return _has_haproxy() and Path(os.environ.get(TLS_FILE, "")).is_file()


def _has_haproxy() -> bool:
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
