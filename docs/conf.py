"""Sphinx: the Markdown pages as they are, and the reference from the docstrings. `make docs` builds them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import specdec_kernels

project = "specdec_kernels"
release = specdec_kernels.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]

# The source directory is the checkout's root, so that links among pages are the same files here as on GitHub.
root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/**", "bench/README.md", "bench/results/cascades/README.md", "specdec_kernels/medusa/*.md"
]  # fmt: skip
html_theme = "furo"
html_title = "specdec_kernels"

myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True

default_role = "py:obj"  # a name in backquotes is a link where there is such a name
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # the sections say more
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def skip_fields(app: Sphinx, kind: str, name: str, thing: Any, skip: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples, of which Python's own docstring says nothing."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None


def describe_data(app: Sphinx, kind: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    """Describe a value by the text below its assignment, in whichever file of its room that is, not by its type's."""
    if kind == "data":
        room, _, attribute = name.rpartition(".")
        files = sorted(Path(str(sys.modules[room].__file__)).parent.rglob("*.py"))
        texts = [ModuleAnalyzer.for_file(file, room).find_attr_docs().get(("", attribute)) for file in files]
        lines[:] = next(filter(None, texts))


def part_attributes(app: Sphinx, kind: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    """Give each of ``a, b : type`` a line: Napoleon knows such a line among parameters, and not among attributes."""
    if "Attributes" in lines:
        begin = lines.index("Attributes")
        for number in reversed(range(begin, len(lines))):
            names, colon, type_ = lines[number].partition(" : ")
            if colon and ", " in names and not names.startswith(" "):
                lines[number : number + 1] = [f"{each} : {type_}" for each in names.split(", ")]


def unlink_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Keep the words of a link to a folder, which leads somewhere on GitHub and to no built page."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if (Path(doctree["source"]).parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", describe_data, priority=400)  # before the sections are read
    app.connect("autodoc-process-docstring", part_attributes, priority=400)
    app.connect("doctree-read", unlink_folders)
