"""Inference engines: one interface for every runtime of compiled models."""

import sys

# Otherwise OpenVINO's converter and NNCF send usage data to Google, each time from a fork of the process.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # None: the import fails, as it may
# OpenVINO runs without its converter. Importing that would take 0.08 s of every replica's start.
sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type] # None: the import fails, as it may
