"""Other libraries that can run on nanovllm, one module each. They see the public interface alone."""
