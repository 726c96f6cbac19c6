"""How Ray 2.60 tells a job's command the job's metadata. Its public API gives a driver only ids."""

import json
import os

_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""``ray._private.runtime_env.constants.RAY_JOB_CONFIG_JSON_ENV_VAR``, without importing Ray."""

SUBMISSION_KEY = "job_submission_id"
"""The key that Ray adds for the job's id."""


def job_metadata() -> dict[str, str]:
    """Return the metadata of this process's job; empty if the process was started by hand."""
    metadata: dict[str, str] | None = json.loads(os.environ.get(_VARIABLE, "{}")).get("metadata")
    return metadata or {}
