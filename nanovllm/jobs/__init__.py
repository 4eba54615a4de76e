"""Large jobs: the rows of a file through an LLM, to a file, with nothing lost if they are killed."""

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import JobOptions, run_batch

__all__ = ["JobError", "JobOptions", "run_batch"]
