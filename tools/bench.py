#!/usr/bin/env python
"""`hybrid-prefix bench`, from a clone."""

import sys

from megatron_hybrid_prefix.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
