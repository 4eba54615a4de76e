"""The device's half of a step: what it knows of each sequence, the KV cache, captured steps, the model's run."""
