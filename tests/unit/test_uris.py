"""Secrets in URIs: every recipe key that takes a URI refuses them, and no message shows them."""

import json
import re
from pathlib import Path

import pytest

from app.config import load_recipe
from app.errors import RecipeError, StorageError
from app.storage import open_storage
from app.tuning.storage import locate_study
from app.uris import holds_secret, without_secrets
from tests.helpers import ROOT

SECRET = "hunter2"
FORMS = [
    f"https://user:{SECRET}@example.org/data.csv",
    f"https://{SECRET}@example.org/data.csv",
    f"https://example.org/data.csv?X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://example.org/data.csv?sig={SECRET}",
    f"https://example.org/?token={SECRET}",
    f"https://example.org/#access_token={SECRET}",
    f"postgresql://host/db?password={SECRET}",
    f"s3://KEY:{SECRET}@bucket/data.csv",
    f"nats://host/stream?api_key={SECRET}",
    f"postgresql://user:{SECRET}/{SECRET}@host/db",
    f"s3://KEY:{SECRET}/{SECRET}@bucket/data.csv",
    f"zip://rows.csv::https://user:{SECRET}@example.org/rows.zip",
    f"simplecache::https://{SECRET}@example.org/data.csv",
    f"http://[::1]:8000/data.csv?token={SECRET}",
    f"dav+https://{SECRET}@example.org/data.csv",
    f"https://example.org/data.csv?userpass={SECRET}",
    *(f"postgresql://user:123{mark}{SECRET}@host/db" for mark in "/?#\\@"),
    *(f"https://123{mark}{SECRET}@example.org/data.csv" for mark in "/?#\\@"),
    f"https://user:{SECRET}/{SECRET}@example.org/data.csv",
    f"s3://KEY:123/{SECRET}@bucket/data.csv",
    f"postgresql://us/er:{SECRET}@host/db",
    f"postgresql://user:1@{SECRET}/{SECRET}@host/db",
    f"nats://{SECRET}@host:4222/stream",
    f"https://example.org/data.csv;password={SECRET}",
    f"https://example.org/data.csv?pass%77ord={SECRET}",
    f"s3://bucket/data.csv,s3://KEY:{SECRET}@bucket/data.csv",
    f"see https://{SECRET}@example.org/data.csv",
    f"nats://host:4222/stream?subject={SECRET}@b",
]
OPEN = [
    "s3://bucket/a@b/data.csv",
    "https://example.org/data.csv?version=2&subject=x",
    "postgresql://user@host/db?sslmode=require&sslkey=/etc/key.pem",
    "nats://host:4222/stream?subject=a.b",
    "nats://host:4222/stream?subject=a%40b",
    "https://host:8080/data%402.csv",
    "s3://user@bucket/a:b@c/data.csv",
    "sqlite:////data/a@b.db",
    "hf://datasets/owner/name@main/data.csv",
    "zip://rows.csv::s3://bucket/rows.zip",
    "github://owner:repository@main/data.csv",
    "postgresql://user@host/db?passfile=/run/pgpass",
    "mysql+pymysql://user@host/db?ssl_key=/etc/key.pem",
    "https://example.org/data.csv?author=a&tokenizer=b&partition_key=c&authSource=d",
    "/data/user:password@here.csv",
    "builtin:reviews",
]
FILES = [uri for uri in FORMS if not uri.startswith("nats")]
HTTP = [uri for uri in FORMS if uri.startswith("http") and "::" not in uri]
KEYS: dict[str, tuple[list[str], list[str]]] = {
    "storage": (FORMS, []),
    "data.source": (FILES, []),
    "data.test_source": (FORMS, ["data.test_fraction=null"]),
    "data.sources": (FILES, ["data.source=null", "data.test_fraction=null"]),
    "model.args": (FORMS, []),
    "tune.storage": (FORMS, []),
    "tracking.mlflow": (HTTP, []),
    "notify.webhook.url": (HTTP, []),
}
"""By key: the forms of URIs that it accepts, and overrides that make the rest of the recipe valid."""


def load_with(key: str, uri: str) -> None:
    values = {
        "data.sources": json.dumps([{"name": "a", "source": uri}, {"name": "b", "source": "/b.csv"}]),
        "model.args": json.dumps({"nested": {"file": uri}}),
    }
    load_recipe(str(ROOT / "recipes/reviews.yaml"), [f"{key}={values.get(key, repr(uri))}", *KEYS[key][1]])


@pytest.mark.parametrize("key", KEYS)
def test_every_key_accepts_a_uri_without_a_secret(key: str) -> None:
    load_with(key, "https://example.org/data")


@pytest.mark.parametrize(("key", "uri"), [(key, uri) for key, (forms, _) in KEYS.items() for uri in forms])
def test_every_key_refuses_a_uri_with_a_secret_and_does_not_show_it(key: str, uri: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_with(key, uri)
    assert SECRET not in str(refused.value)
    assert re.search(
        "a recipe must not contain secrets|the URL carries a password|expected a URL such as", str(refused.value)
    )


@pytest.mark.parametrize(
    "override",
    [
        f"data.source='postgresql://user:my {SECRET}@host/db",
        f'data.source="postgresql://user:\\{SECRET}@host/db"',
        f"postgresql://user:my {SECRET}@host/db",
        f"data.buckets.9=https://user:{SECRET}@host/db",
    ],
)
def test_an_override_that_cannot_be_read_is_refused_without_its_value(override: str) -> None:
    with pytest.raises(RecipeError, match=r"^override|a recipe must not") as refused:
        load_recipe(str(ROOT / "recipes/reviews.yaml"), ["data.buckets=[8, 16]", override])
    assert SECRET not in str(refused.value)


def test_a_recipe_that_is_not_yaml_is_refused_without_its_lines(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"name: r\ndata: {{source: 'postgresql://user:{SECRET}@h/db\n")
    with pytest.raises(RecipeError, match=r"is not YAML: line 3, column 1: ") as refused:
        load_recipe(tmp_path / "r.yaml")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (f"https://host/my file.yaml?X-Amz-Signature={SECRET}", "https://host/my file.yaml"),
        (f"postgresql://user:my {SECRET}@host/db", "postgresql://host/db"),
        (f"s3://KEY:{SECRET}/{SECRET}@bucket/a b", "s3://bucket/a b"),
        (f"zip://rows.csv::https://{SECRET}@host/a.zip", "zip://rows.csv::https://host/a.zip"),
        ("/data/why?.csv", "/data/why?.csv"),
        (f"postgresql://user:123/{SECRET}@host/db", "postgresql://host/db"),
        ("github://owner:repository@main/a@b.csv", "github://owner:repository@main/a@b.csv"),
        ("s3://user@bucket/a@b.csv", "s3://bucket/a@b.csv"),
    ],
)
def test_a_location_is_shown_without_its_secret(location: str, shown: str) -> None:
    assert without_secrets(location) == shown


@pytest.mark.parametrize("uri", OPEN)
def test_what_holds_no_secret_is_taken(uri: str) -> None:
    assert not holds_secret(uri)


@pytest.mark.parametrize("uri", FORMS)
def test_storage_with_a_secret_is_refused_wherever_it_is_given(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_STORAGE", uri)
    with pytest.raises(StorageError) as refused:
        open_storage(None)
    assert (refused.value.rule, refused.value.key) == ("secret.in_storage", "storage")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("query", [f"u:{SECRET}@host/db", f"host/db?password={SECRET}"])
def test_a_study_does_not_show_what_the_environment_holds(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUDY", f"postgresql://{query}")
    assert str(locate_study(open_storage(str(tmp_path)), "env:STUDY", tmp_path, "run")) == "postgresql://host/db"
