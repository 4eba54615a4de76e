"""The example of reinforcement learning, docs/grpo.py, from its first completion to weights that were learned."""

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def grpo():
    path = Path(__file__).parents[2] / "docs" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_rises(grpo, count, capsys):
    """50 steps take it from 0.2 to 0.9; these few must show that it rises at all. It is printed during the run: the
    script said nothing for a minute."""
    means = grpo.run(count(8, 12))
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.05, means
    first, *lines = capsys.readouterr().out.splitlines()
    assert "loading the model" in first and f"mean reward {sum(means[:5]) / 5:.3f}" in lines[0]
    assert [line.split(":")[0].split() for line in lines][-1] == ["step", str(len(means)), "of", str(len(means))]


def test_what_the_engine_says_of_its_tokens_is_what_the_trainer_finds(grpo, monkeypatch):
    """So the ratio of new to old probabilities is one before the first update, and after each update again."""
    ratios = []
    loss_of = grpo.loss_of

    def recorded(model, outputs, advantage):
        for output in outputs:
            completions = torch.tensor([each.token_ids for each in output.outputs])
            old = torch.stack([torch.from_numpy(each.logprobs.of_tokens.copy()) for each in output.outputs])
            prompts = torch.tensor(output.prompt_token_ids).expand(len(completions), -1)
            logits = model(torch.cat([prompts, completions], 1)).logits[:, prompts.shape[1] - 1 : -1]
            new = logits.float().log_softmax(-1).gather(2, completions[..., None])[..., 0]
            ratios.append((new - old).exp().detach())
        return loss_of(model, outputs, advantage)

    monkeypatch.setattr(grpo, "loss_of", recorded)
    grpo.run(3)
    assert len(ratios) == 3 * len(grpo.PROMPTS)
    torch.testing.assert_close(torch.cat(ratios), torch.ones_like(torch.cat(ratios)), rtol=0, atol=1e-3)
