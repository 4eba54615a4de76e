"""Large jobs: runs the rows of a file through an LLM and writes the results to a file; a kill loses nothing."""

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.job import run_batch
from nanovllm.jobs.options import JobOptions, VerifyOptions
from nanovllm.jobs.verify import verify

__all__ = ["JobError", "JobOptions", "VerifyOptions", "run_batch", "verify"]
