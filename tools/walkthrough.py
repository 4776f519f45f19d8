#!/usr/bin/env python
"""The walkthrough of the documents."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "examples/walkthrough.py"), run_name="__main__")
