"""The configuration of Prometheus, Alertmanager and Grafana for one cluster."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from app.cluster.packages import LIBRARY
from app.config import EmailConfig, NotifyConfig, WebhookConfig
from app.config.notify import is_reference
from app.telemetry.alerts.receivers import read_secret

FILES = LIBRARY / "monitoring"
"""The rules, the dashboards and the page, which are the same for every cluster."""
RULES_FILE, PROMETHEUS_FILE, ALERTMANAGER_FILE = "rules.yml", "prometheus.yml", "alertmanager.yml"
DASHBOARDS = "dashboards"
_INTERVAL = "5s"
_SUBJECT = "[rayloom] {{ .CommonLabels.alertname }}: {{ .CommonAnnotations.summary }}"


@dataclass(frozen=True)
class Targets:
    """Where the parts are, each as ``host:port``."""

    dashboard: str
    """Ray's dashboard as a URL. It tells which nodes there are."""
    token_file: Path
    """The file with the cluster's token."""
    prometheus: str = "127.0.0.1:9090"
    alertmanager: str = "127.0.0.1:9093"
    exporter: str = "127.0.0.1:9187"
    """The process that ``app.monitoring.server`` runs."""
    node_exporter: str | None = None


def write_configuration(folder: Path, targets: Targets, notify: NotifyConfig) -> None:
    """Write all files into a folder, which is made.

    Raises:
        DeliveryError: a secret of the receivers cannot be read here. Nothing was written.
    """
    # First, so that a secret that cannot be read leaves nothing behind.
    alertmanager = alertmanager_configuration(notify)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(FILES / RULES_FILE, folder / RULES_FILE)
    shutil.copytree(FILES / DASHBOARDS, folder / DASHBOARDS, dirs_exist_ok=True)
    _write(folder / PROMETHEUS_FILE, prometheus_configuration(targets))
    _write(folder / ALERTMANAGER_FILE, alertmanager)
    provisioning = folder / "grafana" / "provisioning"
    _write(provisioning / "datasources" / "rayloom.yml", _grafana_datasource(targets))
    _write(provisioning / "dashboards" / "rayloom.yml", _grafana_dashboards(folder / DASHBOARDS))


def prometheus_configuration(targets: Targets) -> dict[str, Any]:
    """Return what Prometheus scrapes and whom it tells of alerts."""
    # Prometheus 2.42 sends the bare token unless the type is written out, and Ray refuses that.
    token = {"type": "Bearer", "credentials_file": str(targets.token_file.absolute())}
    discovery = {"url": f"{targets.dashboard}/api/prometheus/sd", "refresh_interval": _INTERVAL, "authorization": token}
    static = {"rayloom": targets.exporter} | ({"node": targets.node_exporter} if targets.node_exporter else {})
    return {
        "global": {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": [RULES_FILE],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [targets.alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": "ray", "http_sd_configs": [discovery]},
            *(  # our label ``job`` of a failed job must not become ``exported_job``
                {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [target]}]}
                for name, target in static.items()
            ),
        ],
    }


def alertmanager_configuration(notify: NotifyConfig) -> dict[str, Any]:
    """Return who is told of alerts: the receivers that a recipe names under ``notify``, with their secrets read.

    An alert is sent once when it fires, once when it ends, and again after 4 hours if it does not end.

    Raises:
        DeliveryError: a secret cannot be read here.
    """
    receiver: dict[str, Any] = {"name": "receivers"}
    if notify.webhook:
        receiver["webhook_configs"] = [_webhook(notify.webhook)]
    if notify.email:
        receiver["email_configs"] = [_email(notify.email)]
    route = {
        "receiver": receiver["name"],
        "group_by": ["alertname", "model", "run", "submission_id"],
        "group_wait": "1s",
        "group_interval": "30s",
        "repeat_interval": "4h",
    }
    # What a lost node takes with it is told by the alert of the node.
    lost_node = {
        "source_matchers": ['alertname="RayloomNodeLost"'],
        "target_matchers": ['alertname=~"Rayloom(Replica|Proxy|Worker)Lost|RayloomTargetDown"'],
    }
    return {"route": route, "receivers": [receiver], "inhibit_rules": [lost_node]}


def _webhook(config: WebhookConfig) -> dict[str, Any]:
    """Return the webhook. Alertmanager cannot sign, so it shows the secret that signs our own messages as a token."""
    token = (
        {"type": "Bearer", "credentials": read_secret("notify.webhook.secret", config.secret)} if config.secret else {}
    )
    url = read_secret("notify.webhook.url", config.url) if is_reference(config.url) else config.url
    return {"url": url, "send_resolved": True, "http_config": {"authorization": token} if token else {}}


def _email(config: EmailConfig) -> dict[str, Any]:
    login = (
        {"auth_username": config.username, "auth_password": read_secret("notify.email.password", config.password)}
        if config.username and config.password
        else {}
    )
    return {
        "to": ", ".join(config.to),
        "from": config.sender,
        "smarthost": f"{config.host}:{config.port}",
        "require_tls": config.security == "starttls",
        "send_resolved": True,
        "headers": {"subject": _SUBJECT},
        **login,
    }


def _grafana_datasource(targets: Targets) -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "url": f"http://{targets.prometheus}", "isDefault": True}
    return {"apiVersion": 1, "datasources": [source]}


def _grafana_dashboards(folder: Path) -> dict[str, Any]:
    provider = {"name": "Rayloom", "folder": "Rayloom", "type": "file", "options": {"path": str(folder.absolute())}}
    return {"apiVersion": 1, "providers": [provider]}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write YAML that only its owner reads: it may hold secrets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        yaml.safe_dump(content, file, sort_keys=False)
