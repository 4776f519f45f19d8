#!/usr/bin/env python
"""`hybrid-prefix serve`, from a clone; alone or under torchrun."""

import sys

from megatron_hybrid_prefix.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
