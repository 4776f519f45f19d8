#!/usr/bin/env python
"""Serve a hybrid model over HTTP: see `megatron_hybrid_prefix/cli/serve.py`, or `--help`."""

import sys

from megatron_hybrid_prefix.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
