"""The endpoint over TLS, whichever ingress a cluster has."""

import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import trustme
from tritonclient.utils import InferenceServerException
from upath import UPath

from app.tensors import OUTPUT
from tests.engine_contract import PROCESSOR, SIGNATURE, TEXTS, exported, rows
from tests.helpers import CLUSTER, local_cluster, run
from tests.jobs import run_job
from tests.toy import LABELS, asked, expected, publish_version


@contextmanager
def own_proxy() -> Iterator[dict[str, str]]:
    """Start a cluster with Serve's own proxy, beside the cluster of the other tests."""
    with (
        tempfile.TemporaryDirectory(prefix="rayloom-test-") as home,
        local_cluster(Path(home), RAY_SERVE_ENABLE_HA_PROXY="0") as environment,
    ):
        yield environment


@contextmanager
def haproxy(cluster: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the cluster of the other tests. Restart Serve, because TLS cannot be added to an endpoint without it."""
    end_serve(cluster)
    yield cluster
    end_serve(cluster)


def end_serve(cluster: dict[str, str]) -> None:
    """End Serve and its applications."""
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
    applications = f"{cluster['RAY_API_SERVER_ADDRESS']}/api/serve/applications/"
    httpx.delete(applications, headers={"Authorization": f"Bearer {token}"}, timeout=60).raise_for_status()


@pytest.fixture(
    params=[
        pytest.param("HAProxy", marks=pytest.mark.xdist_group(CLUSTER)),
        pytest.param("Serve's own proxy", marks=pytest.mark.slow),
    ]
)
def proxied(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """A cluster with this ingress."""
    with haproxy(request.getfixturevalue("cluster")) if request.param == "HAProxy" else own_proxy() as environment:
        yield environment


def test_clients_of_every_protocol_see_the_given_certificate(proxied: dict[str, str], tmp_path: Path) -> None:
    authority, certificate = trustme.CA(), tmp_path / "certificate.pem"
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    publish_version(UPath(proxied["RAYLOOM_STORAGE"]), "secret", exported(), SIGNATURE, PROCESSOR, LABELS)

    def deploy() -> dict[str, str]:
        """With a new certificate."""
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(tmp_path / "key.pem")
        tls = f"serve.tls={{certificate: {certificate}, key: {tmp_path}/key.pem}}"
        recipe = ["recipes/reviews.yaml", "name=secret", "serve.version=1", "serve.auth=token", tls]
        artifacts: dict[str, str] = run_job(proxied, "deploy", *recipe)["artifacts"]
        return artifacts

    deployed = deploy()
    endpoint, token = deployed["http"], Path(proxied["RAYLOOM_HOME"]) / "endpoint_token"
    assert endpoint.startswith("https://")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{endpoint}/v2")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert httpx.get(f"{endpoint}/v2", verify=trusting).status_code == 401
    ask = ["rayloom", "predict", "secret", TEXTS[0], "--endpoint", endpoint, "--token-file", str(token)]
    answered = run(*ask, environment=proxied | {"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
    assert answered.returncode == 0, answered.stderr
    assert any(label in answered.stdout for label in LABELS)

    is_own = proxied.get("RAY_SERVE_ENABLE_HA_PROXY") == "0"  # has no TLS for gRPC, and reads the files only once
    client = tritonclient.grpc.InferenceServerClient(
        deployed["grpc"], ssl=not is_own, root_certificates=str(tmp_path / "ca.pem")
    )
    with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
        client.get_model_metadata("secret")
    shown = {"authorization": f"Bearer {token.read_text(encoding='utf-8').strip()}"}
    answer = client.infer("secret", asked(tritonclient.grpc, rows(1)), headers=shown)
    assert np.allclose(answer.as_numpy(OUTPUT), expected(rows(1)), atol=1e-4)
    assert client.get_model_metadata("secret", headers=shown).name == "secret"
    with pytest.raises(InferenceServerException, match="NOT_FOUND"):
        client.infer("nothing", asked(tritonclient.grpc, rows(1)), headers=shown)
    answers: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=shown)
    client.async_stream_infer("secret", asked(tritonclient.grpc, rows(2)))
    streamed, error = answers.get(timeout=60)
    client.stop_stream()
    assert error is None
    assert np.allclose(streamed.as_numpy(OUTPUT), expected(rows(2)), atol=1e-4)
    if is_own:
        return

    deploy()
    host, _, port = deployed["grpc"].rpartition(":")
    assert ssl.get_server_certificate((host, int(port))).split() == certificate.read_text(encoding="utf-8").split()
