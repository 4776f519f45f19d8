"""The command `hybrid-prefix` as a script: for `launch.run_prepared` and torchrun."""

import sys

from megatron_hybrid_prefix.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
