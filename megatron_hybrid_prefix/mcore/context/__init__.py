"""Megatron's inference context and block allocator, over the cache."""
