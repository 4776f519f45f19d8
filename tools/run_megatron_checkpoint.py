#!/usr/bin/env python
"""Prompts through a Megatron checkpoint."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "examples/megatron_checkpoint.py"), run_name="__main__")
