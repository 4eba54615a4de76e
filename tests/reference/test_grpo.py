"""The example of reinforcement learning, docs/grpo.py, from its first completion to weights that were learned."""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

NUM_RECORDED = 3


class Run(NamedTuple):
    """A run of the example.

    means: the mean reward of each step.
    printed: what it printed.
    ratios: the ratio of new to old probabilities of each token, for each prompt of the first NUM_RECORDED steps.
    num_prompts: prompts per step.
    """

    means: list[float]
    printed: str
    ratios: list[torch.Tensor]
    num_prompts: int


@pytest.fixture(scope="module")
def run(count) -> Run:
    path = Path(__file__).parents[2] / "docs" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    grpo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grpo)
    loss_of, ratios, printed = grpo.loss_of, [], io.StringIO()

    @torch.no_grad()
    def record(model, outputs) -> None:
        for output in outputs:
            completions = torch.tensor([each.token_ids for each in output.outputs])
            old = torch.stack([torch.from_numpy(each.logprobs.of_tokens.copy()) for each in output.outputs])
            prompts = torch.tensor(output.prompt_token_ids).expand(len(completions), -1)
            logits = model(torch.cat([prompts, completions], 1)).logits[:, prompts.shape[1] - 1 : -1]
            new = logits.float().log_softmax(-1).gather(2, completions[..., None])[..., 0]
            ratios.append((new - old).exp())

    def recorded(model, outputs, advantage):
        if len(ratios) < NUM_RECORDED * len(grpo.PROMPTS):
            record(model, outputs)
        return loss_of(model, outputs, advantage)

    grpo.loss_of = recorded
    with contextlib.redirect_stdout(printed):
        means = grpo.run(count(8, 12))
    return Run(means, printed.getvalue(), ratios, len(grpo.PROMPTS))


def test_the_reward_rises(run):
    """50 steps take it from 0.2 to 0.9; these few must show that it rises at all. It is printed during the run: the
    script said nothing for a minute."""
    means = run.means
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.05, means
    first, *lines = run.printed.splitlines()
    assert "loading the model" in first and f"mean reward {sum(means[:5]) / 5:.3f}" in lines[0]
    assert [line.split(":")[0].split() for line in lines][-1] == ["step", str(len(means)), "of", str(len(means))]


def test_what_the_engine_says_of_its_tokens_is_what_the_trainer_finds(run):
    """So the ratio of new to old probabilities is one before the first update, and after each update again."""
    assert len(run.ratios) == NUM_RECORDED * run.num_prompts
    ratios = torch.cat(run.ratios)
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)
