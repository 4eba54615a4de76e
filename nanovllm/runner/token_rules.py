"""The penalties, biases and bans of the running sequences, by entry of the SequenceTable.

If a sequence's rules do not fit, wider tensors replace the old ones. `version` identifies the current tensors: a
captured step that reads them is valid for one version.
"""

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.ops.process_logits import ALWAYS, Edits, TokenRules, edits_of, pack_allowed
from nanovllm.ops.upload import upload

_NO_PENALTIES = (1.0, 0.0, 0.0)
_NARROWEST = 8  # initial room of an entry for edits, and for the tokens of their prefixes


class TokenRulesTable:
    """TokenRules for `num_entries` entries, the last of which is padding and stays without rules.

    tensors: the rules.
    version: 1 at first; it grows by 1 whenever the tensors are replaced.
    """

    def __init__(self, num_entries: int, vocab_size: int, device: torch.device):
        self._num_entries, self._vocab_size, self._device = num_entries, vocab_size, device
        self._is_ruled = np.zeros(num_entries, bool)
        self._masks: torch.Tensor | None = None
        self.tensors = self._empty(_NARROWEST, _NARROWEST)
        self.version = 1

    def admit(self, sequences: list[Sequence], entries: np.ndarray) -> np.ndarray:
        """Stores the rules of sequences that are new in their entries.

        Returns:
            int64 [num_seqs], the length from which on a sequence's rules no longer change anything; 0 without rules.
        """
        until = np.array([_ruled_until(seq) for seq in sequences], np.int64)
        # An entry whose last tenant had rules must lose them: if one row of a step has rules, all rows are processed.
        changed = np.flatnonzero((until > 0) | self._is_ruled[entries])
        if len(changed):
            self._is_ruled[entries[changed]] = True  # until all of it is sent: Ctrl-C may come in between
            self._send([sequences[index] for index in changed], entries[changed])
        self._is_ruled[entries] = until > 0
        return until

    def mask_buffer(self, num_rows: int) -> np.ndarray:
        """See Runner. The masks of 256 rows are 5 MB: new memory would cost a millisecond of page faults, and memory
        that is not pinned would cost another copy."""
        if self._masks is None:
            allowed = self.tensors.allowed
            shape = self._num_entries, allowed.shape[1]
            self._masks = torch.empty(shape, dtype=allowed.dtype, device="cpu", pin_memory=self._device.type == "cuda")
        return self._masks[:num_rows].numpy()

    def constrain(self, entries: np.ndarray, masks: np.ndarray) -> None:
        """Sets which ids the entries may sample next: int32 [len(entries), ceil(vocab_size / 32)], a bit each. The copy
        is asynchronous, so the masks must not change until the step's tokens have arrived."""
        (on_device,) = upload([entries], self._device)
        sent = torch.from_numpy(masks).to(self._device, non_blocking=True)
        self.tensors.allowed.index_copy_(0, on_device, sent)

    def _send(self, sequences: list[Sequence], entries: np.ndarray) -> None:
        edits = [_edits(seq) for seq in sequences]
        rules = self._wide_enough(max(len(e.ids) for e in edits), max(len(e.prefix_tokens) for e in edits))
        num_seqs, num_edits, num_prefix_tokens = len(edits), rules.edit_ids.shape[1], rules.prefix_tokens.shape[1]
        ids = np.full((num_seqs, num_edits), -1, np.int32)
        values = np.zeros((num_seqs, num_edits), np.float32)
        until, prefixes = np.zeros((num_seqs, num_edits), np.int32), np.zeros((num_seqs, num_edits, 2), np.int32)
        prefix_tokens = np.zeros((num_seqs, num_prefix_tokens), np.int32)
        for row, e in enumerate(edits):
            n = len(e.ids)
            ids[row, :n], values[row, :n], until[row, :n], prefixes[row, :n] = e.ids, e.values, e.until, e.prefixes
            prefix_tokens[row, : len(e.prefix_tokens)] = e.prefix_tokens
        params = [seq.sampling_params for seq in sequences]
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        new = {
            "num_prompt_tokens": np.array([seq.num_prompt_tokens for seq in sequences], np.int32),
            "penalties": np.array(penalties, np.float32),
            "allowed": np.stack([pack_allowed(p.allowed_token_ids, self._vocab_size) for p in params]),
            "edit_ids": ids,
            "edit_values": values,
            "edit_until": until,
            "edit_prefix": prefixes,
            "prefix_tokens": prefix_tokens,
        }
        on_device, *sent = upload([entries, *new.values()], self._device)
        sent_of = dict(zip(new, sent, strict=True))
        for name, place in vars(rules).items():
            place.index_copy_(0, on_device, sent_of[name])

    def _wide_enough(self, num_edits: int, num_prefix_tokens: int) -> TokenRules:
        """The tensors, made wider if one sequence's edits would not fit."""
        old = self.tensors
        wanted = max(num_edits, old.edit_ids.shape[1]), max(num_prefix_tokens, old.prefix_tokens.shape[1])
        if wanted != (old.edit_ids.shape[1], old.prefix_tokens.shape[1]):
            # Powers of two, so that it seldom happens.
            new = self._empty(*(1 << (width - 1).bit_length() for width in wanted))
            for wide, narrow in zip(vars(new).values(), vars(old).values(), strict=True):
                (wide[:, : narrow.shape[1]] if narrow.ndim > 1 else wide).copy_(narrow)
            self.version, self.tensors = self.version + 1, new
        return self.tensors

    def _empty(self, num_edits: int, num_prefix_tokens: int) -> TokenRules:
        """Tensors of entries without rules."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((self._num_entries, *shape), value, dtype=dtype, device=self._device)

        no_penalties = torch.tensor(_NO_PENALTIES, dtype=torch.float32, device=self._device)
        return TokenRules(
            num_prompt_tokens=full(0, torch.int32),
            penalties=no_penalties.repeat(self._num_entries, 1),
            allowed=full(-1, torch.int32, -(-self._vocab_size // 32)),
            edit_ids=full(-1, torch.int32, num_edits),
            edit_values=full(0, torch.float32, num_edits),
            edit_until=full(0, torch.int32, num_edits),
            edit_prefix=full(0, torch.int32, num_edits, 2),
            prefix_tokens=full(0, torch.int32, num_prefix_tokens),
        )


def _edits(seq: Sequence) -> Edits:
    params = seq.sampling_params
    bad_words = [word for word in params.bad_words or () if not isinstance(word, str)]  # the engine takes no strings
    # A guide's masks heed it. A rank of several knows only that there is a guide.
    min_tokens = 0 if seq.is_constrained and not params.logits_processors else params.min_tokens
    return edits_of(params.logit_bias or {}, bad_words, sorted(seq.stop_token_ids), min_tokens)


def _ruled_until(seq: Sequence) -> int:
    params = seq.sampling_params
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if seq.is_constrained:
        return ALWAYS
    if penalties != _NO_PENALTIES or params.logit_bias or params.bad_words or params.allowed_token_ids:
        return ALWAYS
    min_tokens = min(params.min_tokens, ALWAYS)
    return seq.num_prompt_tokens + min_tokens if min_tokens and seq.stop_token_ids else 0
