"""Operations whose result for a token does not depend on the other tokens of a step, bit by bit.

`HybridPrefixConfig(exact="bits")` computes with them. `scope` says whether a forward does. On a GPU the functions of this folder
call Triton kernels; on a CPU they cut rows into tiles of one size, so that BLAS always multiplies the same
shapes.
"""
