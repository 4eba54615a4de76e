"""Attention over the paged KV cache: the backends behind one protocol, the choice between them, a step's metadata."""
