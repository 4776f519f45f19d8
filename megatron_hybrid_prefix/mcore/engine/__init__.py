"""Megatron's engine and controller with the cache."""
