"""`python -m megatron_hybrid_prefix`: the same as the command `hybrid-prefix`."""

import sys

from megatron_hybrid_prefix.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
