#!/usr/bin/env python
"""Generates from a Megatron checkpoint with this cache; alone or under torchrun."""

import sys

from megatron_hybrid_prefix.cli.megatron_checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
