#!/usr/bin/env python
"""`hybrid-prefix demo`, from a clone."""

import sys

from megatron_hybrid_prefix.cli.demo import main

if __name__ == "__main__":
    sys.exit(main())
