"""The ranks of one model: a process for each, and the runner that drives them."""
