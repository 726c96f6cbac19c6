"""Inference engines: one interface for every runtime of compiled models."""

import sys

# OpenVINO runs without its converter. Importing that, with its telemetry, would take 0.08 s of every replica's start.
sys.modules.setdefault("openvino.tools.ovc", None)  # type: ignore[arg-type] # None: the import fails, as it may
