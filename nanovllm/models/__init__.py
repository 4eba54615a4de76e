"""Models: their configuration and its cost, every decoder on one page, and the loading of weights."""
