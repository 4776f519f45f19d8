#!/usr/bin/env python
"""Follows one conversation through the cache; see `docs/walkthrough.md`."""

import sys

from megatron_hybrid_prefix.cli.walkthrough import main

if __name__ == "__main__":
    sys.exit(main())
