#!/usr/bin/env python
"""`hybrid-prefix plan`, from a clone."""

import sys

from megatron_hybrid_prefix.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
