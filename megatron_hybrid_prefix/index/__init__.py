"""What is cached: keys of blocks, the tree of prefixes, the matcher, and who holds which KV block."""
