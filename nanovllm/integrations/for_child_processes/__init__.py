"""A directory on the path of the processes that a script for vLLM starts: `import vllm` finds nanovllm there."""
