"""The text parts of multimodal checkpoints: tokens are those of transformers, in float32 on the CPU."""

import random

import pytest
from support.against_transformers import Tally, compare, ragged_prompts
from support.family_factory import WRAPPED, save_family_model

from nanovllm.runner import settings

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.mark.grid(1)
@pytest.mark.parametrize("family", WRAPPED)
@pytest.mark.parametrize(("backend", "overlap"), [("sdpa", True), ("sdpa", False), ("torch", True)])
def test_greedy_completions_are_those_of_the_whole_model(tmp_path, family, backend, overlap, count, monkeypatch):
    """The checkpoints are as `save_pretrained` writes them: with the wrapper's names and its vision part. For text,
    mrope in any sections is the ordinary rotary embedding."""
    monkeypatch.setattr(settings, "_MIN_SAVED_TOKENS", {"cpu": 1})  # short prompts are worth a snapshot of their states
    rng = random.Random(f"{family} {backend} {overlap}")
    tally = Tally()
    for index in range(count(3, 20)):
        options = WRAPPED[family][2](rng)
        directory = tmp_path / str(index)
        model = save_family_model(directory, family, options, seed=rng.randrange(10**6))
        # The last ids are placeholders of images and videos.
        compare(model, directory, ragged_prompts(rng, options["vocab_size"] - 2), rng, backend, overlap, tally)
    assert tally.num_ties <= tally.num_rows / 100
    assert tally.num_repeating <= tally.num_rows / count(2, 3)
    assert tally.num_cached_tokens > tally.num_rows
