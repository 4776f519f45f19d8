"""Operations on states by slot. Each file has the Triton kernel, its wrapper and its PyTorch reference."""
