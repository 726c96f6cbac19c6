"""HTTPS, as far as Ray Serve has it."""

import os
import ssl

from app.config import TlsConfig
from app.errors import ClusterError


def tls_options(tls: TlsConfig | None) -> dict[str, str]:
    """What Serve's HTTP options say of TLS: nothing without a certificate.

    Raises:
        ClusterError: Serve cannot do it in this cluster, or the files are no certificate and its key.
    """
    if tls is None:
        return {}
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        # With these options the replicas would speak TLS, and HAProxy, which asks them in the clear, find them dead.
        raise ClusterError(
            "serve.tls is given, and this cluster's ingress is HAProxy, which Ray starts without TLS: put a proxy that "
            "ends TLS in front of the endpoint, set serve.auth to token and leave serve.tls out; or start the cluster "
            "with RAY_SERVE_ENABLE_HA_PROXY=0, whose ingress is slower and speaks TLS"
        )
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate, tls.key, password="")
    except OSError as error:  # an SSLError is one
        raise ClusterError(
            f"serve.tls: {tls.certificate!r} and {tls.key!r} cannot be loaded ({error}): expected a certificate and "
            "its key in PEM, the key without a password"
        ) from error
    return {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
