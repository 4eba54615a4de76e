"""Checks a job's rows with the tokenizer, before the model's weights are loaded."""

import logging
from dataclasses import dataclass

import numpy as np

from nanovllm import Preflight, PreflightSummary
from nanovllm.jobs.errors import Errors
from nanovllm.jobs.index import Index
from nanovllm.jobs.plan import in_pieces
from nanovllm.jobs.report import num_rows_in_words

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_PIECE, _BYTES_OF_PIECE = 256, 2**24


@dataclass(frozen=True)
class Checked:
    """The results of the check.

    Args:
        num_rows: rows that were checked, including those without a prompt.
        summary: summary of the rows with a prompt.
        refused: rows whose prompts cannot run.
    """

    num_rows: int
    summary: PreflightSummary
    refused: Errors

    def log(self, index: Index) -> None:
        summary = self.summary
        tokenized = "all" if self.num_rows == len(index) else f"{self.num_rows:,} of them"
        logger.info(
            "%s; tokenized %s: %s prompt tokens, longest prompt: %s, new tokens: at most %s. Distinct prefixes of 64 "
            "tokens: %s; %.0f%% of these prompt tokens can come from the prefix cache",
            num_rows_in_words(len(index)), tokenized, f"{summary.num_prompt_tokens:,}", f"{summary.longest_prompt:,}",
            f"{summary.max_num_new_tokens:,}", f"{summary.num_distinct_prefixes:,}", 100 * summary.expected_hit_rate,
        )  # fmt: skip
        for errors in (index.errors, self.refused):
            if errors.num_rows:
                logger.warning("%s cannot run: %s", num_rows_in_words(errors.num_rows), errors.in_words())


def check_rows(index: Index, preflight: Preflight, num_rows: int) -> Checked:
    """Tokenizes `num_rows` rows, spread evenly over the input."""
    numbers = np.linspace(0, len(index) - 1, num_rows).astype(np.int64).tolist()
    read = (each for each in map(index.read, numbers) if each[0].error is None)
    refused = Errors()
    for rows in in_pieces(read, _ROWS_OF_PIECE, _BYTES_OF_PIECE):
        checks = preflight.check([row.prompt for row in rows], [index.params.of(row) for row in rows])
        for row, check in zip(rows, checks, strict=True):
            if check.error is not None:
                refused.add(row.number, row.id, check.error)
    return Checked(num_rows, preflight.summary(), refused)
