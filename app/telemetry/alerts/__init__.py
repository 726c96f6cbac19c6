"""Alerts: rules over what training reports, and who is told when one comes true."""

from app.telemetry.alerts.alerts import Alerts
from app.telemetry.alerts.notification import Action, Notification
from app.telemetry.alerts.notifier import Notifier

__all__ = ["Action", "Alerts", "Notification", "Notifier"]
