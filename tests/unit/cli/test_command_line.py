"""What every command line has."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from app.cli.main import app


def test_the_version_is_that_of_the_package() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.stdout) == (0, f"rayloom {version('rayloom')}\n")


@pytest.mark.parametrize("command", [[], ["submit"], ["runs"], ["runs", "list"], ["models", "import"], ["plan"]])
def test_the_short_option_helps_as_the_long_one_does(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout
    assert "Usage" in long.stdout
