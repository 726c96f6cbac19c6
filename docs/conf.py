"""Sphinx's configuration of the documentation: 'make docs' builds it."""

import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docs.generated_pages import PAGES

project = "Rayloom"
author = "the authors of Rayloom"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_*"]
nitpicky = False  # annotations name classes of libraries that have no page here

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "separated"
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Rayloom"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False


def _write_generated_pages(_: Sphinx) -> None:
    for name, render in PAGES.items():
        page, text = HERE / "reference" / name, render()
        if not page.exists() or page.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
            page.write_text(text, encoding="utf-8")


def _copy_benchmarks(_: Sphinx) -> None:
    """Copy the benchmarks' pages and what they link to: Sphinx reads pages from one folder only."""
    for kind in ("*.md", "*/*.md", "*/*.svg", "*/*.py"):
        for page in (HERE.parent / "benchmarks").glob(kind):
            target = HERE / "benchmarks" / page.relative_to(HERE.parent / "benchmarks")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(page, target)


def _link_to_copies(_: Sphinx, __: str, source: list[str]) -> None:
    """Let links to and from the benchmarks, which hold in the repository, hold in the site."""
    source[0] = re.sub(r"\]\((\.\./)+(docs/|(?=benchmarks/))", "](/", source[0])


def _drop_module_docstring(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    if what == "module":  # written for readers of the code, in no markup
        lines.clear()


def setup(sphinx: Sphinx) -> None:
    """Bring pages from code and benchmarks before Sphinx looks for pages."""
    sphinx.connect("builder-inited", _write_generated_pages)
    sphinx.connect("builder-inited", _copy_benchmarks)
    sphinx.connect("source-read", _link_to_copies)
    sphinx.connect("autodoc-process-docstring", _drop_module_docstring)
