"""TLS, where the ingress has it."""

from pathlib import Path

import pytest
import trustme

from app.config import TlsConfig
from app.serving.ingress.haproxy import TLS_FILE
from jobs._tls import give_to_haproxy, haproxy_speaks_tls, require_possible, serve_options
from tests.wording import refused


@pytest.fixture
def files(tmp_path: Path) -> TlsConfig:
    """A certificate and its key."""
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    return TlsConfig(certificate=str(tmp_path / "certificate.pem"), key=str(tmp_path / "key.pem"))


def test_serves_own_proxy_is_given_the_files(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    require_possible(files)
    assert serve_options(files) == {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    assert serve_options(None) == {}


def test_a_haproxy_of_ours_is_shown_both_in_a_file_for_this_user(
    files: TlsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "tls.pem"
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv(TLS_FILE, str(shown))
    require_possible(files)
    assert serve_options(files) == {}, "of the replicas, which it asks in the clear"
    give_to_haproxy(files)
    assert haproxy_speaks_tls()
    assert shown.stat().st_mode & 0o777 == 0o600
    pair = Path(files.certificate).read_bytes() + Path(files.key).read_bytes()
    assert shown.read_bytes().split() == pair.split()
    give_to_haproxy(None)
    assert not haproxy_speaks_tls(), "what an endpoint of before was shown is gone"


def test_haproxy_as_ray_starts_it_is_refused_with_a_way_out(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.delenv(TLS_FILE, raising=False)
    with refused("tls.no_proxy", "serve.tls"):
        require_possible(files)


def test_files_that_are_no_pair_are_refused(files: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    Path(files.key).write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    for wrong in (files, files.model_copy(update={"key": "/nowhere"}), files.model_copy(update={"key": __file__})):
        with refused("tls.unreadable", "serve.tls"):
            require_possible(wrong)
