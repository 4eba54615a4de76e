"""The maths of a decoder layer, and each layer's own rule for loading its shard of a checkpoint."""
