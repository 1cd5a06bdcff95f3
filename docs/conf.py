"""Sphinx configuration."""

import sb3_ben

project = "sb3_ben"
copyright = "2026, the sb3_ben developers"
version = release = sb3_ben.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
html_theme = "sphinx_rtd_theme"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
