"""Checks a job's rows with the tokenizer, before the model's weights are loaded."""

import logging
from dataclasses import dataclass

import numpy as np

from nanovllm import Preflight, PreflightSummary
from nanovllm.jobs.errors import Errors, JobError
from nanovllm.jobs.index import Index
from nanovllm.jobs.options import JobOptions
from nanovllm.jobs.plan import in_pieces
from nanovllm.jobs.report import num_rows_in_words

logger = logging.getLogger("nanovllm.jobs")

_ROWS_OF_SAMPLE, _ROWS_OF_LOOK = 5000, 16
_ROWS_OF_PIECE, _BYTES_OF_PIECE = 256, 2**24


@dataclass(frozen=True)
class Checked:
    """The results of the check.

    Args:
        num_rows: rows that were tokenized; all rows of the job, if each of the others has an error of its own.
        summary: summary of the rows that were tokenized.
        refused: rows among them that cannot run.
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
        if len(runnable := np.flatnonzero(index.can_run)):
            row, _ = index.read(int(runnable[0]))
            texts = row.prompt if isinstance(row.prompt, tuple) else (row.prompt,)
            noun = "query and document" if len(texts) == 2 else "prompt"
            logger.info("the first %s: %s", noun, ", ".join(f"{text!r:.400}" for text in texts))
        for errors in (index.errors, self.refused):
            if errors.num_rows:
                logger.warning("%s cannot run: %s", num_rows_in_words(errors.num_rows), errors.in_words())

    def refuse_if_none_can_run(self, index: Index, is_look: bool) -> None:
        """Raises a JobError if there are rows, and none that was checked can run. If a look at a few rows finds that,
        it is a warning, because others may run."""
        errors = index.errors + self.refused
        if not errors.num_rows or self.summary.num_prompts > self.summary.num_errors:
            return
        if self.num_rows == len(index):
            raise JobError(f"no row can run: {errors.in_words()}")
        seen = f"none of the {num_rows_in_words(self.num_rows)} that were checked can run (--preflight full checks all)"
        if not is_look:
            raise JobError(f"{seen}: {errors.in_words()}")
        logger.warning("%s: %s", seen, errors.in_words())


def num_to_check(options: JobOptions, num_rows: int) -> int:
    """How many rows of a new job are tokenized before the weights are loaded."""
    needs_all = options.dry_run or options.on_error == "stop"
    kind = options.preflight or ("full" if needs_all else "sample")
    # Without a preflight, a job still checks whether any of its rows can run.
    num_off = 0 if options.dry_run else _ROWS_OF_LOOK
    return {"off": num_off, "sample": _ROWS_OF_SAMPLE, "full": num_rows}[kind]


def check_rows(index: Index, preflight: Preflight, num_rows: int) -> Checked:
    """Tokenizes at most `num_rows` of the rows that can run as far as the index knows, spread evenly over the input."""
    candidates = np.flatnonzero(index.can_run)
    has_all = num_rows >= len(candidates)
    places = np.linspace(0, len(candidates) - 1, min(num_rows, len(candidates))).astype(np.int64)
    numbers = candidates[places].tolist()
    refused = Errors(index.lines.place)
    for rows in in_pieces(map(index.read, numbers), _ROWS_OF_PIECE, _BYTES_OF_PIECE):
        checks = preflight.check([row.prompt for row in rows], [index.params.of(row) for row in rows])
        for row, check in zip(rows, checks, strict=True):
            if check.error is not None:
                refused.add(row.number, row.id, check.error)
    return Checked(len(index) if has_all else num_rows, preflight.summary(), refused)
