"""Megatron-core's internals, which no other folder knows. `check` looks at the installed version before the first engine."""
