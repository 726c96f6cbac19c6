"""The documented task outside ``app/``: digits pasted on canvases are found, compiled, and asked for over HTTP."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sklearn.datasets import load_digits
from upath import UPath

from app.compile.run import compile_model
from app.config import load_recipe
from app.data.images import encode_png
from app.errors import DataError
from app.repository.repository import Repository
from app.runs import Run, execute
from app.serving.config import DeployedModel, EndpointConfig, VersionConfig
from app.tasks import prepare
from tests.helpers import ROOT, train_alone
from tests.serving import serving

RECIPE = str(ROOT / "docs/examples/detection.yaml")
SIDE = 32


def write_canvases(folder: Path, count: int) -> list[dict[str, Any]]:
    """Write pictures with a zero or a one, or both, of 8 x 8 pixels, and return what is in them."""
    digits, generator, rows = load_digits(), np.random.default_rng(3), []
    for number in range(count):
        canvas, boxes = np.zeros((SIDE, SIDE), np.uint8), []
        for half in range(2):
            if half and generator.random() < 0.5:
                continue
            label = int(generator.integers(2))
            chosen = generator.choice(np.flatnonzero(digits.target == label))
            left, top = int(generator.integers(SIDE - 8)), 16 * half + int(generator.integers(9))
            canvas[top : top + 8, left : left + 8] = digits.images[chosen] * 15
            x, y = (left + 4) / SIDE, (top + 4) / SIDE
            boxes.append({"label": str(label), "x": x, "y": y, "width": 0.25, "height": 0.25})
        (folder / f"{number}.png").write_bytes(encode_png(canvas))
        rows.append({"image": f"{number}.png", "boxes": boxes})
    (folder / "boxes.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return rows


@pytest.mark.slow
def test_a_task_outside_the_library_is_trained_compiled_and_served(tmp_path: Path) -> None:
    rows = write_canvases(tmp_path, 400)
    given = [f"storage={tmp_path}/storage", f"data.source={tmp_path}/boxes.jsonl", "train.workers=1"]
    trained = train_alone(*given, recipe=RECIPE)
    assert trained["metrics"]["val_found_f1"] > 0.6
    fast = ["compile.engines=[openvino]", "compile.batch_sizes=[1, 8]", "compile.precisions=[fp32, int8]"]
    recipe = load_recipe(RECIPE, [*given, *fast])
    result = execute(Run.start("compile", recipe), compile_model)
    assert result.status == "succeeded", result.error
    assert result.metrics["accuracy"]["score"]["metric"] == "found_f1"
    version = VersionConfig.of(
        recipe.storage or "", Repository(UPath(recipe.storage)).manifest("detection", 1), recipe.serve
    )
    with serving() as server:
        server.run(server.endpoint.update(EndpointConfig(models={"detection": DeployedModel(production=version)})))
        pictures = [base64.b64encode((tmp_path / row["image"]).read_bytes()).decode() for row in rows[:40]]
        answer = httpx.post(f"http://{server.http}/v1/models/detection/predict", json={"inputs": pictures}, timeout=30)
    assert answer.status_code == 200, answer.text
    found = [{(box["label"], round(box["y"])) for box in item["boxes"]} for item in answer.json()["predictions"]]
    true = [{(box["label"], round(box["y"])) for box in row["boxes"]} for row in rows[:40]]
    assert sum(map(len, map(set.intersection, found, true))) > 0.6 * sum(map(len, true))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"picture": "0.png"}', "data.columns.input is 'image', which .*boxes.jsonl', line 1 does not have"),
        ('{"image": "0.png", "boxes": [{"label": "0"}]}', "expected a label, x, y, width and height"),
        ('{"image": "0.png", "boxes": []}', "has no boxes: expected some"),
    ],
)
def test_a_file_of_boxes_that_cannot_be_read_is_refused(tmp_path: Path, line: str, words: str) -> None:
    write_canvases(tmp_path, 30)
    lines = [line.replace("0.png", f"{number}.png") for number in range(30)]
    (tmp_path / "boxes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=words):
        prepare(load_recipe(RECIPE, [f"data.source={tmp_path}/boxes.jsonl"]))
