"""Operations, one per file: the plain twin, its kernel, and the function that chooses."""
