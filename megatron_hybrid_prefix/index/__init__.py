"""The prefix index: block keys and the prefix tree."""
