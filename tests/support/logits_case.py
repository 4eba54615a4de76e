"""Requests with penalties, bans and biases, and the definition of each, written plainly."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from nanovllm.ops.process_logits import (
    ALWAYS,
    TokenRules,
    edits_of,
    pack_allowed,
    process_logits,
)

INF = float("inf")


@dataclass
class Settings:
    """The settings of one request, for single tokens; the defaults change no logit."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    allowed: list[int] | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0


@dataclass
class Request:
    prompt: list[int]
    completion: list[int]
    settings: Settings


def definition(logits: torch.Tensor, request: Request) -> np.ndarray:
    """One row's logits, processed as the definitions say, number by number in float32."""
    values = [np.float32(value) for value in logits.tolist()]
    prompt, completion, settings = request.prompt, request.completion, request.settings
    repetition, presence, frequency = map(np.float32, (settings.repetition, settings.presence, settings.frequency))
    every = range(len(values))
    banned = [] if settings.allowed is None else [token for token in every if token not in settings.allowed]
    for token, bias in settings.logit_bias.items():
        values[token] += np.float32(bias)
    for *prefix, last in settings.bad_words:
        if completion[len(completion) - len(prefix) :] == prefix and len(completion) >= len(prefix):
            banned.append(last)
    if len(completion) < settings.min_tokens:
        banned += settings.stop_token_ids
    for token in banned:
        values[token] += np.float32(-INF)
    for token in set(prompt + completion):
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token, count in Counter(completion).items():
        values[token] -= frequency * np.float32(count)
        values[token] -= presence
    return np.array(values, np.float32)


def padded(rows: list[np.ndarray], width: int, fill: float) -> torch.Tensor:
    out = np.full((len(rows), width, *rows[0].shape[1:]), fill, rows[0].dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def make_rules(requests: list[Request], vocab_size: int, spare: int = 0) -> TokenRules:
    """The table's tensors; spare: the number of unused places for edits and prefix tokens."""
    settings = [request.settings for request in requests]
    edits = [edits_of(each.logit_bias, each.bad_words, each.stop_token_ids, each.min_tokens) for each in settings]
    num_edits = max(len(each.ids) for each in edits) + spare
    num_prefix_tokens = max(len(each.prefix_tokens) for each in edits) + spare
    return TokenRules(
        torch.tensor([len(request.prompt) for request in requests], dtype=torch.int32),
        torch.tensor([[each.repetition, each.presence, each.frequency] for each in settings]),
        torch.from_numpy(np.stack([pack_allowed(each.allowed, vocab_size) for each in settings])),
        padded([each.ids for each in edits], num_edits, -1),
        padded([each.values for each in edits], num_edits, 3.0),
        padded([each.until for each in edits], num_edits, ALWAYS),
        padded([each.prefixes for each in edits], num_edits, 0),
        padded([each.prefix_tokens for each in edits], num_prefix_tokens, 0),
    )


@dataclass
class Case:
    """Requests in a table whose last entry is neutral, and a step's rows."""

    logits: torch.Tensor
    entries: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor
    rules: TokenRules
    requests: list[Request]

    def run(self, process: Callable = process_logits, first_id: int = 0) -> torch.Tensor:
        return process(self.logits, self.entries, self.lengths, self.tokens, self.rules, first_id)

    def expected(self) -> np.ndarray:
        rows = zip(self.logits.float(), self.entries.tolist(), self.lengths.tolist(), strict=True)
        return np.stack([definition(row, self.requests[entry]) for row, entry, _ in rows])

    def to(self, device: torch.device) -> "Case":
        rules = TokenRules(*(getattr(self.rules, each.name).to(device) for each in fields(TokenRules)))
        tensors = (self.logits, self.entries, self.lengths, self.tokens)
        return Case(*(tensor.to(device) for tensor in tensors), rules, self.requests)


def make_case(requests: list[Request], logits: torch.Tensor, entries: list[int] | None = None, spare: int = 0) -> Case:
    """A row per request, or per entry named; −1 makes a padding row. After its length, each entry of the table holds
    garbage.
    """
    requests = [*requests, Request([], [], Settings())]
    entries = list(range(len(requests) - 1)) if entries is None else [entry % len(requests) for entry in entries]
    known = [request.prompt + request.completion for request in requests]
    generator = torch.Generator().manual_seed(len(known))
    max_len = max(map(len, known)) + 1 + spare
    tokens = torch.randint(-2, logits.shape[1] + 2, (len(requests), max_len), generator=generator).int()
    for entry, ids in enumerate(known):
        tokens[entry, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    lengths = torch.tensor([len(known[entry]) for entry in entries], dtype=torch.int32)
    rules = make_rules(requests, logits.shape[1], spare)
    return Case(logits, torch.tensor(entries), lengths, tokens, rules, requests)


def random_settings(rng: random.Random, vocab_size: int, ids: list[int]) -> Settings:
    """ids: the ids of the histories, so that rules often apply to them."""

    def some(maximum: int) -> list[int]:
        return [rng.choice(ids) for _ in range(rng.randrange(maximum + 1))]

    settings = Settings()
    if rng.random() < 0.6:
        settings.repetition = rng.choice([1.0, 1.3, 0.7, 2.0])
        settings.presence = rng.choice([0.0, 0.0, 0.9, -1.5])
        settings.frequency = rng.choice([0.0, 0.0, 0.3, -0.7])
    if rng.random() < 0.3:
        settings.allowed = rng.sample(range(vocab_size), rng.randrange(vocab_size + 1))
    if rng.random() < 0.4:
        settings.logit_bias = {token: rng.choice([rng.uniform(-9, 9), -INF]) for token in some(5)}
    if rng.random() < 0.5:
        settings.bad_words = [[rng.choice(ids) for _ in range(rng.randint(1, 4))] for _ in range(rng.randrange(6))]
    if rng.random() < 0.4:
        settings.stop_token_ids, settings.min_tokens = some(3), rng.randrange(6)
    return settings


def random_case(rng: random.Random, vocab_size: int, num_rows: int, max_len: int) -> Case:
    ids = rng.sample(range(vocab_size), min(vocab_size, rng.choice([2, 3, 10, 200])))
    requests = []
    for _ in range(rng.randint(1, num_rows)):
        known = [rng.choice(ids) for _ in range(rng.randint(1, max_len))]
        num_prompt = rng.randint(0, len(known))
        settings = Settings() if rng.random() < 0.2 else random_settings(rng, vocab_size, ids)
        requests.append(Request(known[:num_prompt], known[num_prompt:], settings))
    entries = [rng.randint(-1, len(requests) - 1) for _ in range(num_rows)]
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 8
    broken = torch.rand(num_rows, vocab_size, generator=generator)
    for value, share in ((-INF, 0.05), (INF, 0.002), (float("nan"), 0.001), (0.0, 0.02)):
        logits = torch.where(broken < share, value, logits)
    wide = torch.full((num_rows, vocab_size + rng.choice([0, 3])), float("nan"), dtype=dtype)
    wide[:, :vocab_size] = logits
    return make_case(requests, wide[:, :vocab_size], entries, spare=rng.choice([0, 1, 5]))


def assert_same(ours: torch.Tensor, expected: torch.Tensor | np.ndarray) -> None:
    """Equal numbers, bit for bit but for the sign of zero."""
    assert ours.dtype == torch.float32 and ours.is_contiguous()
    np.testing.assert_array_equal(ours.cpu().numpy(), np.asarray(expected))
