"""The device's side of a step: its table of sequences, the KV cache, captured steps and the model's forward pass."""
