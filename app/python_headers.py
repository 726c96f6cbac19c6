"""Python's C headers, which torch and DeepSpeed compile against."""

import sysconfig
from pathlib import Path

from app.errors import RayloomError


def require_python_headers(what: str, error: type[RayloomError]) -> None:
    """Raise ``error`` if this machine has no ``Python.h``: a compiler would say so in pages of its own output.

    Args:
        what: what compiles, as the subject of the message.
    """
    folder = sysconfig.get_path("include")
    if not (Path(folder) / "Python.h").is_file():
        raise error(
            f"{what} compiles C++ against Python.h, which {folder!r} lacks: install the headers of Python on every "
            "machine that runs it, on Debian with apt-get install python3-dev"
        )
