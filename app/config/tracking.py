"""The tracking servers that runs are copied to."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from app.config.notify import is_reference
from app.config.section import Section

_SCHEMES = ("http", "https", "databricks")


def is_mlflow_server(uri: str) -> bool:
    """Return whether a URI names a server. MLflow would open others as databases or folders of this machine."""
    return uri.partition("://")[0] in _SCHEMES


def _check_uri(given: str) -> str:
    if is_reference(given):
        return given
    if not is_mlflow_server(given):
        raise ValueError("expected a URI such as https://mlflow.example.org, or env:NAME or file:/PATH that holds it")
    return given


class WandbConfig(Section):
    """A project in Weights & Biases. It reads its key from ``WANDB_API_KEY`` where the job runs."""

    project: Annotated[str, Field(min_length=1)] = Field(description="name of the project")
    entity: str | None = Field(default=None, description="user or team; null: the key's own")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: write into the folder wandb of the run, for 'wandb sync'"
    )


class TrackingConfig(Section):
    """Where runs are copied to, beside their folder in storage and TensorBoard."""

    mlflow: Annotated[str, AfterValidator(_check_uri)] | None = Field(
        default=None,
        description="URI of an MLflow server, or env:NAME or file:/PATH that holds it. Needs the extra mlflow. "
        "MLflow reads its own variables, such as MLFLOW_TRACKING_TOKEN, where the job runs",
        examples=["https://mlflow.example.org"],
    )
    wandb: WandbConfig | None = Field(default=None, description="Weights & Biases; needs the extra wandb")
    experiment: str | None = Field(default=None, description="MLflow's experiment; null: the recipe's name")
    register_versions: bool = Field(
        default=False, description="whether a version that jobs.compile publishes enters MLflow's model registry, too"
    )

    @property
    def trackers(self) -> list[str]:
        """The trackers that are set, by the names of their keys, of their clients and of Rayloom's extras."""
        return [name for name in ("mlflow", "wandb") if getattr(self, name)]
