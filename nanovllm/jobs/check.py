"""What the tokenizer can tell of a job's rows, before the model's weights are loaded."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nanovllm import Preflight, PreflightSummary
from nanovllm.jobs.errors import Errors
from nanovllm.jobs.index import Index, name_of
from nanovllm.jobs.report import num_rows_in_words
from nanovllm.jobs.row_params import RowParams
from nanovllm.jobs.rows import JobRow
from nanovllm.jobs.source import Source

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_PIECE, _BYTES_OF_PIECE = 256, 2**24


@dataclass(frozen=True)
class Checked:
    """What was found.

    Args:
        num_rows: rows that were looked at, those without a prompt included.
        summary: of those with a prompt.
        refused: rows whose prompts cannot run.
    """

    num_rows: int
    summary: PreflightSummary
    refused: Errors

    def say(self, num_rows: int, index: Index) -> None:
        """Logs what was found. `num_rows`: rows of the whole job."""
        summary = self.summary
        tokenized = "all" if self.num_rows == num_rows else f"{self.num_rows:,} of them"
        logger.info(
            "%s; tokenized %s: %s prompt tokens, longest prompt: %s, new tokens: at most %s. Distinct prefixes of 64 "
            "tokens: %s; %.0f%% of these prompt tokens can come from the prefix cache",
            num_rows_in_words(num_rows), tokenized, f"{summary.num_prompt_tokens:,}", f"{summary.longest_prompt:,}",
            f"{summary.max_num_new_tokens:,}", f"{summary.num_distinct_prefixes:,}", 100 * summary.expected_hit_rate,
        )  # fmt: skip
        for errors in (index.errors, self.refused):
            if errors.num_rows:
                logger.warning("%s cannot run: %s", num_rows_in_words(errors.num_rows), errors.in_words())

    def as_report(self) -> dict[str, Any]:
        """For the report; docs/jobs.md lists the keys."""
        return {"checked_rows": self.num_rows, **asdict(self.summary)}

    def errors(self, index: Index) -> Errors:
        """All rows that cannot run, as far as is known."""
        errors = Errors()
        errors.include(index.errors)
        errors.include(self.refused)
        return errors


def check_rows(lines: Source, index: Index, params: RowParams, preflight: Preflight, num_rows: int) -> Checked:
    """Tokenizes `num_rows` rows, spread evenly over the input."""
    numbers = np.linspace(0, len(lines) - 1, num_rows).astype(np.int64).tolist()
    refused = Errors()
    for rows in _pieces(lines, index, numbers):
        checks = preflight.check([row.prompt for row in rows], [params.of(row) for row in rows])
        for row, check in zip(rows, checks, strict=True):
            if check.error is not None:
                refused.add(name_of(row), check.error)
    return Checked(num_rows, preflight.summary(), refused)


def _pieces(lines: Source, index: Index, numbers: list[int]) -> Iterator[list[JobRow]]:
    """The rows without errors, in lists of a few rows and bytes."""
    piece: list[JobRow] = []
    num_bytes = 0
    for number in numbers:
        line = lines.read(number)
        row = index.row(number, line)
        if row.error is None:
            piece.append(row)
            num_bytes += len(line)
        if len(piece) == _ROWS_OF_PIECE or num_bytes >= _BYTES_OF_PIECE:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece
