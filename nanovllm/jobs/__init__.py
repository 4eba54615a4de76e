"""Large jobs: runs the rows of a file through an LLM and writes the results to a file; a kill loses nothing."""

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import JobOptions, run_batch

__all__ = ["JobError", "JobOptions", "run_batch"]
