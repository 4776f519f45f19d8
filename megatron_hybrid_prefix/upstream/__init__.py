"""What this package relies on in megatron-core: `contracts/` lists it, `check` compares it with the installed version."""
