"""The manifest of a version: what it is and where it came from."""

from datetime import datetime

from pydantic import BaseModel

MANIFEST_FILE = "manifest.json"
MODEL_FILE = "model.onnx"


class EngineKey(BaseModel):
    """What a compiled model was made for."""

    onnx_sha256: str
    precision: str
    engine: str
    engine_version: str
    architecture: str


class Lineage(BaseModel):
    """Where a version came from."""

    train_run: str
    compile_run: str
    recipe: str
    data_fingerprint: str
    code: str


class ModelCard(BaseModel):
    """What a publisher knows of a model: what it is, where it came from, and how it measured up."""

    task: str
    engine_key: EngineKey
    lineage: Lineage
    accuracy: float
    max_difference: float


class Manifest(ModelCard):
    """A published version, with the sha256 of each of its files."""

    name: str
    version: int
    created: datetime
    files: dict[str, str]
