"""Attention over the paged KV cache: the backends behind one base class, the choice between them, a step's metadata."""
