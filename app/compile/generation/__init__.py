"""Compilation of a language model into a published version that generates tokens."""

import app.engines  # noqa: F401 # before OpenVINO, so that it sends no usage data
