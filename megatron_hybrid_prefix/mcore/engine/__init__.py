"""Megatron's engine and controller, where they have to know of the cache."""
