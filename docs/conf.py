"""Settings of Sphinx; ``scripts/docs.sh`` runs it.

The source folder is the root of the repository, so that links between the README, ``docs/`` and the other documents are the
same on the site and in a clone.
"""

from __future__ import annotations

from megatron_hybrid_prefix._version import __version__
from megatron_hybrid_prefix.platform import ensure_platform

ensure_platform(device="cpu")  # before autodoc imports modules that import megatron

project = "megatron_hybrid_prefix"
copyright = "the contributors of megatron_hybrid_prefix"
release = version = __version__

root_doc = "docs/site"
include_patterns = ["*.md", "docs/**", "examples/README.md"]
# Sphinx does not even look into these folders.
exclude_patterns = [".*", "build", "dist", "megatron_hybrid_prefix", "out", "scripts", "tests", "tools", "*.egg-info"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4  # links to headings, as GitHub names them
# A fence without a language that Pygments knows is plain text, not a warning.
suppress_warnings = ["misc.highlighting_failure"]

default_role = "py:obj"  # `name` in a docstring is a link where the name is on the site
smartquotes = False  # "--flag" stays as it is
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
# "Returns:" holds sentences. Napoleon would take what stands before a colon for a type; types are in the signature.
napoleon_custom_sections = ["Returns"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"{project} {__version__}"
html_copy_source = False
html_show_copyright = False
