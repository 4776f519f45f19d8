"""Operations whose result for a row does not depend on the other rows, for ``HybridPrefixConfig(exact="bits")``."""
