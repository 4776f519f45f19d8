#!/usr/bin/env python
"""`hybrid-prefix replay`, from a clone."""

import sys

from megatron_hybrid_prefix.cli.replay import main

if __name__ == "__main__":
    sys.exit(main())
