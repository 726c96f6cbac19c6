"""The folder from which a job is submitted, and Rayloom's packages, which its cluster may lack."""

import os
from pathlib import Path
from typing import Any

from app.errors import ClusterError
from app.storage import HOME, absolute_location

LIBRARY = Path(__file__).resolve().parents[2]
"""The folder with Rayloom's packages: a checkout, or ``site-packages``."""
PACKAGES = ("app", "jobs", "serve_deployments", "tune_spaces")


def default_storage() -> str:
    """Return the storage of a local cluster's jobs.

    ``$RAYLOOM_STORAGE``, else ``storage`` in the current folder if that is a project or a checkout, which have
    recipes, else ``storage`` in the checkout that runs, else the default of an installed Rayloom.
    """
    if location := os.environ.get("RAYLOOM_STORAGE"):
        return absolute_location(location)
    for folder in (Path.cwd(), LIBRARY):
        if (folder / "recipes").is_dir():
            return str(folder / "storage")
    return str(HOME / "storage")


def is_checkout(folder: Path) -> bool:
    """Return True if the folder is a checkout of Rayloom. Its packages are then uploaded with it."""
    return (folder / "app/cluster" / Path(__file__).name).is_file()


def known_jobs(folder: Path) -> list[str]:
    """Return the names of the jobs that can be submitted from a folder.

    Raises:
        ClusterError: the folder has its own package with the name of one of Rayloom's.
    """
    if not is_checkout(folder):
        require_own_names(folder)
        folder = LIBRARY
    # Modules with a leading underscore are shared by jobs, and are no jobs.
    return sorted(file.stem for file in (folder / "jobs").glob("[!_]*.py"))


def require_own_names(folder: Path) -> None:
    """Refuse a folder in which Python would import another package in place of one of Rayloom's.

    Raises:
        ClusterError: the folder has such a module or package.
    """
    for name in PACKAGES:
        # A folder without modules, such as one for assets, cannot be imported in place of a package.
        module, package = folder / f"{name}.py", folder / name
        if module.is_file() or next(package.glob("*.py"), None):
            own = module if module.is_file() else package
            raise ClusterError(
                f"{str(own)!r} has the name of Rayloom's package {name!r}, which a job could not import beside it: "
                "rename it, or submit from another folder"
            ).of("package.name_taken")


def runtime_env(folder: str, has_rayloom: bool) -> dict[str, Any]:
    """Return Ray's runtime environment of a job: the folder as its working directory, and Rayloom's packages.

    Args:
        has_rayloom: the cluster runs on this machine with this installation, so the packages need not be sent.
    """
    if has_rayloom or is_checkout(Path(folder)):
        return {"working_dir": folder}
    packages = [str(LIBRARY / name) for name in PACKAGES]
    return {"working_dir": folder, "py_modules": packages, "excludes": ["__pycache__"]}
