"""The configuration of Sphinx; `python -m docs.site.build` runs it on the pages that it made."""

from __future__ import annotations

import composable
from docs.site.build import inventory_of_torch

project = "composable"
version = release = composable.__version__
html_title = f"composable {release}"
copyright = author = "the authors of composable"
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.intersphinx", "docs.site.extension"]
root_doc = "README"
exclude_patterns: list[str] = []
myst_heading_anchors = 6  # as GitHub makes them
myst_enable_extensions = ["colon_fence"]
intersphinx_mapping = inventory_of_torch()

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_use_index = True
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True
maximum_signature_line_length = 72
add_module_names = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
