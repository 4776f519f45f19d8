"""For tools that still call it; the metadata are in ``pyproject.toml``."""

from setuptools import setup

setup()
