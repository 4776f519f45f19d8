"""Operations on states by slot. Each file: what it computes, and its PyTorch reference."""
