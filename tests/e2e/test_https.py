"""The endpoint over HTTPS, on a cluster whose ingress is Serve's own proxy."""

import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from upath import UPath

from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported
from tests.helpers import local_cluster, run, submit
from tests.toy import LABELS, publish_version


@pytest.fixture
def proxied() -> Iterator[dict[str, str]]:
    """A cluster without HAProxy, beside the one of the other tests."""
    with (
        tempfile.TemporaryDirectory(prefix="rayloom-test-") as home,
        local_cluster(Path(home), RAY_SERVE_ENABLE_HA_PROXY="0") as environment,
    ):
        yield environment


def test_it_shows_the_given_certificate_and_asks_for_the_token(proxied: dict[str, str], tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    publish_version(UPath(proxied["RAYLOOM_STORAGE"]), "secret", exported(), SIGNATURE, PROCESSOR, LABELS)
    tls = f"serve.tls={{certificate: {tmp_path}/certificate.pem, key: {tmp_path}/key.pem}}"
    deployed = submit(
        proxied, "deploy", "recipes/reviews.yaml", "name=secret", "serve.version=1", "serve.auth=token", tls
    )
    endpoint, token = deployed["artifacts"]["http"], Path(proxied["RAYLOOM_HOME"]) / "endpoint_token"
    assert endpoint.startswith("https://")

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{endpoint}/v2")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert httpx.get(f"{endpoint}/v2", verify=trusting).status_code == 401
    ask = ["rayloom", "predict", "secret", TEXTS[0], "--endpoint", endpoint, "--token-file", str(token)]
    answered = run(*ask, environment=proxied | {"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
    assert answered.returncode == 0, answered.stderr
    assert any(label in answered.stdout for label in LABELS)
