"""Inference engines: one interface for every runtime of compiled models."""

import sys

# Without this, OpenVINO's converter and NNCF send usage data to Google, each time from a fork of the process.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # None: the import fails, as it may
# OpenVINO runs without its converter. Importing it would add 0.08 s to every replica's start.
sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type] # None: the import fails, as it may
