"""HTTPS, where Serve has it."""

from pathlib import Path

import pytest
import trustme

from app.config import TlsConfig
from app.errors import ClusterError
from jobs._tls import tls_options


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    """A certificate and its key."""
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    return TlsConfig(certificate=str(tmp_path / "certificate.pem"), key=str(tmp_path / "key.pem"))


def test_serves_own_proxy_is_given_the_files(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert tls_options(files) == {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}


def test_haproxy_which_ray_starts_without_tls_is_refused_with_a_way_out(
    files: TlsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert tls_options(None) == {}
    with pytest.raises(ClusterError, match=r"put a proxy that ends TLS in front .* or start the cluster with"):
        tls_options(files)


def test_files_that_are_no_pair_are_refused(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    Path(files.key).write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    for wrong in (files, files.model_copy(update={"key": "/nowhere"}), files.model_copy(update={"key": __file__})):
        with pytest.raises(
            ClusterError, match=r"serve\.tls: .*cannot be loaded .*: expected a certificate and its key"
        ):
            tls_options(wrong)
