"""The prefix index: block keys, the prefix tree, the matcher, and the reference counts of KV blocks."""
