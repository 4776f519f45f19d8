#!/usr/bin/env python
"""`hybrid-prefix generate`, from a clone; alone or under torchrun."""

import sys

from megatron_hybrid_prefix.cli.generate import main
from megatron_hybrid_prefix.tokenizer import common_tokens  # noqa: F401  (_serve_chat.py takes it from here)

if __name__ == "__main__":
    sys.exit(main())
