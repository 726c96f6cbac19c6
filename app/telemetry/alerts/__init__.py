"""Alerts: rules over the records of training, and the receivers that are notified when one fires."""

from app.telemetry.alerts.alerts import Alerts
from app.telemetry.alerts.notification import Notification
from app.telemetry.alerts.notifier import Notifier

__all__ = ["Alerts", "Notification", "Notifier"]
