#!/usr/bin/env python
"""`hybrid-prefix generate`, from a clone; alone or under torchrun."""

import sys

from megatron_hybrid_prefix.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
