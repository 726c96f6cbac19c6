"""Notifications arrive at a real HTTP server and a real mail server, and a bad one of them disturbs nobody."""

import hashlib
import hmac
import json
import queue
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope

from app.config import load_recipe
from app.errors import TryLaterError
from app.telemetry.alerts import Alerts, Notification
from app.telemetry.alerts.receivers import AppriseService
from app.telemetry.record import Record
from tests.helpers import ROOT, documented, wait_until
from tests.receiver import HttpReceiver

SECRET = "a secret of the receiver"


class MailReceiver:
    """Keeps mails; answers with the given lines, the last one for ever."""

    def __init__(self, *answers: str) -> None:
        self.mails: queue.Queue[Envelope] = queue.Queue()
        self._answers = list(answers)

    async def handle_DATA(self, server: object, session: object, envelope: Envelope) -> str:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer.startswith("250"):
            self.mails.put(envelope)
        return answer


@pytest.fixture
def smtp() -> Iterator[Callable[..., int]]:
    controllers: list[Controller] = []

    def start(receiver: MailReceiver, **settings: Any) -> int:
        controllers.append(Controller(receiver, hostname="127.0.0.1", port=_free_port(), **settings))
        controllers[-1].start()
        return int(controllers[-1].port)

    yield start
    for controller in controllers:
        controller.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alerts_of(rule: Mapping[str, Any] = {"above": 2}, apprise: Sequence[str] = (), **notify: dict[str, Any]) -> Alerts:
    receivers: dict[str, Any] = {kind: {"retry_wait_s": 0.01, **settings} for kind, settings in notify.items()}
    receivers["apprise"] = [*apprise]
    overrides = [
        f"alerts={json.dumps([{'metric': 'loss', **rule, 'do': ['notify', 'pause']}])}",
        f"notify={json.dumps(receivers)}",
    ]
    return Alerts.of(load_recipe(ROOT / "recipes/digits.yaml", overrides), "run-1")


def mail_settings(port: int, **settings: Any) -> dict[str, Any]:
    return {"host": "localhost", "port": port, "sender": "rayloom@example.org", "to": ["a@example.org"], **settings}


class Step(Record):
    kind = "step"
    loss: float


def observe(alerts: Alerts, loss: float = 3.0) -> None:
    alerts.append(Step(step=12, epoch=2, loss=loss))
    assert alerts.action == "pause"


def test_a_webhook_is_tried_until_it_takes_a_signed_notification(
    http: Callable[..., HttpReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    receiver = http(500, 500, 200)
    alerts = alerts_of(webhook={"url": receiver.url, "secret": "env:HOOK_SECRET"})
    observe(alerts)
    alerts.close()
    assert len(receiver.requests) == 3
    assert len({body for _, body in receiver.requests}) == 1
    is_genuine = documented("how-to/get_alerts.md", hashlib=hashlib, hmac=hmac, time=time, Mapping=Mapping)[
        "is_genuine"
    ]
    for headers, body in receiver.requests:
        assert headers["Content-Type"] == "application/json"
        assert is_genuine(SECRET, headers, body)
        assert not is_genuine("another secret", headers, body)
        assert not is_genuine(SECRET, headers, body.replace(b"3.0", b"2.0"))
        assert not is_genuine(SECRET, headers | {"X-Rayloom-Timestamp": str(int(time.time()) + 1)}, body)
    told = json.loads(receiver.requests[-1][1])
    jsonschema.validate(told, Notification.model_json_schema(mode="serialization"))
    assert told.pop("time").endswith("Z")
    assert len(told.pop("id")) == 32
    assert told == {
        "run_id": "run-1",
        "recipe": "digits",
        "rule": "loss above 2",
        "action": "pause",
        "metric": "loss",
        "value": 3.0,
        "step": 12,
        "epoch": 2,
    }


def test_a_value_that_is_no_number_is_still_json(http: Callable[..., HttpReceiver]) -> None:
    receiver = http(204)
    alerts = alerts_of({"not_finite": True}, webhook={"url": receiver.url})
    observe(alerts, nan)
    alerts.close()
    headers, body = receiver.requests[0]
    assert json.loads(body, parse_constant=pytest.fail)["value"] == "NaN"
    assert "X-Rayloom-Signature" not in headers


@pytest.mark.parametrize(("status", "tries"), [(503, 3), (429, 3), (404, 1), (302, 1)])
def test_what_is_not_taken_is_given_up_with_one_line(
    http: Callable[..., HttpReceiver], capsys: pytest.CaptureFixture[str], status: int, tries: int
) -> None:
    receiver = http(status)
    alerts = alerts_of(webhook={"url": receiver.url, "attempts": 3})
    observe(alerts)
    alerts.close()
    assert len(receiver.requests) == tries
    warned = f"warning: alerts: webhook at 127.0.0.1: gave up on 'loss above 2' (it answered {status})\n"
    assert capsys.readouterr().err == warned


def test_nobody_there_is_one_line_and_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    alerts = alerts_of(
        webhook={"url": f"http://127.0.0.1:{_free_port()}/private", "attempts": 2},
        email=mail_settings(_free_port(), attempts=2),
    )
    observe(alerts)
    alerts.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("gave up on 'loss above 2'" in line and "private" not in line for line in lines)


def test_a_receiver_that_never_answers_delays_neither_training_nor_another(
    http: Callable[..., HttpReceiver], smtp: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    stuck, mail = http(200), MailReceiver("250 OK")
    stuck.open.clear()
    alerts = alerts_of(webhook={"url": stuck.url, "timeout_s": 600.0}, email=mail_settings(smtp(mail), security="none"))
    observe(alerts)
    wait_until(lambda: len(stuck.requests) == 1)
    for _ in range(150):  # more than wait for one receiver; each returns though the first hangs
        observe(alerts, 1.0)
        observe(alerts, 3.0)
        mail.mails.get(timeout=60)
    alerts.close(timeout_s=0.1)
    assert not stuck.open.is_set()
    errors = capsys.readouterr().err
    assert errors.count("more are dropped") == 1
    assert errors.count("webhook at 127.0.0.1: not all was delivered before the end") == 1
    assert "mail server" not in errors


def test_a_secret_that_is_missing_leaves_the_receiver_out(
    http: Callable[..., HttpReceiver], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    receiver = http(200)
    alerts = alerts_of(webhook={"url": receiver.url, "secret": f"file:{tmp_path / 'nothing'}"})
    observe(alerts)
    alerts.close()
    assert receiver.requests == []
    assert "notify.webhook.secret is file:" in capsys.readouterr().err


def test_an_address_can_be_a_secret(http: Callable[..., HttpReceiver], tmp_path: Path) -> None:
    receiver = http(200)
    (tmp_path / "url").write_text(f"{receiver.url}\n", encoding="utf-8")
    alerts = alerts_of(webhook={"url": f"file:{tmp_path / 'url'}"})
    observe(alerts)
    alerts.close()
    assert len(receiver.requests) == 1


def test_a_mail_is_tried_again_and_says_what_happened(smtp: Callable[..., int]) -> None:
    receiver = MailReceiver("451 busy", "250 OK")
    alerts = alerts_of(email=mail_settings(smtp(receiver), security="none"))
    observe(alerts)
    alerts.close()
    mail = receiver.mails.get_nowait()
    assert (mail.mail_from, mail.rcpt_tos) == ("rayloom@example.org", ["a@example.org"])
    assert isinstance(mail.content, bytes)
    text = mail.content.decode()
    assert "Subject: [rayloom] digits: loss above 2" in text
    assert "alert: loss above 2 (loss 3, epoch 2, step 12): training pauses" in text


def test_a_mail_goes_over_tls_with_a_login(
    smtp: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority, receiver = trustme.CA(), MailReceiver("250 OK")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("MAIL_PASSWORD", "hunter2")
    context = _server_context(authority)
    logins: list[tuple[bytes, bytes]] = []

    def authenticate(server: object, session: object, envelope: object, mechanism: str, data: Any) -> AuthResult:
        logins.append((data.login, data.password))
        return AuthResult(success=True)

    port = smtp(receiver, tls_context=context, require_starttls=True, authenticator=authenticate, auth_required=True)
    alerts = alerts_of(email=mail_settings(port, username="rayloom", password="env:MAIL_PASSWORD"))
    observe(alerts)
    alerts.close()
    assert receiver.mails.qsize() == 1
    assert logins == [(b"rayloom", b"hunter2")]


@pytest.mark.parametrize("offers_tls", [False, True], ids=["no TLS", "a certificate of nobody"])
def test_no_mail_without_the_tls_that_was_asked_for(
    smtp: Callable[..., int], capsys: pytest.CaptureFixture[str], offers_tls: bool
) -> None:
    receiver = MailReceiver("250 OK")
    settings = {"tls_context": _server_context(trustme.CA())} if offers_tls else {}
    alerts = alerts_of(email=mail_settings(smtp(receiver, **settings)))
    observe(alerts)
    alerts.close()
    assert receiver.mails.empty()
    assert capsys.readouterr().err.count("gave up") == 1


def test_apprise_tells_each_service_what_happened(
    http: Callable[..., HttpReceiver], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = http(200), http(200)
    monkeypatch.setenv("FIRST_URL", first.url.replace("http:", "json:"))
    (tmp_path / "url").write_text(second.url.replace("http:", "json:") + "\n", encoding="utf-8")
    alerts = alerts_of(apprise=["env:FIRST_URL", f"file:{tmp_path / 'url'}"])
    observe(alerts)
    alerts.close()
    for receiver in (first, second):
        ((_, body),) = receiver.requests
        told = json.loads(body)
        assert told["title"] == "[rayloom] digits: loss above 2"
        assert "alert: loss above 2 (loss 3, epoch 2, step 12): training pauses" in told["message"]
        assert told["type"] == "warning"


def test_a_service_that_apprise_does_not_reach_is_tried_again_and_its_url_is_not_shown(
    http: Callable[..., HttpReceiver], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = http(503, 200)
    monkeypatch.setenv("SERVICE_URL", receiver.url.replace("http:", "json:"))
    service = AppriseService("env:SERVICE_URL", timeout_s=5.0)
    notification = Notification(
        run_id="run-1", recipe="digits", rule="r", action="stop", metric=None, value=None, step=1, epoch=1
    )
    with pytest.raises(TryLaterError):
        service.send(notification)
    service.send(notification)
    assert len(receiver.requests) == 2
    assert capfd.readouterr().err == ""


def test_what_apprise_cannot_use_leaves_the_receiver_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WRONG_URL", "nonsense://private")
    monkeypatch.setenv("RIGHT_URL", "json://127.0.0.1:1/private")
    alerts_of(apprise=["env:WRONG_URL"]).close()
    monkeypatch.setitem(sys.modules, "apprise", None)
    alerts_of(apprise=["env:RIGHT_URL"]).close()
    unknown, missing = capsys.readouterr().err.splitlines()
    assert "notify.apprise is env:WRONG_URL, which holds no URL that Apprise knows" in unknown
    assert "install rayloom[notify]" in missing
    assert "private" not in unknown + missing


def _server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context
