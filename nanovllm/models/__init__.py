"""Models: the one reader of their configuration, every decoder on one page, and their weights."""
