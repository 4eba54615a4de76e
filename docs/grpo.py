"""Reinforcement learning with nanovllm, on any machine: GRPO teaches the bundled model to answer with vowels.

    python docs/grpo.py [--steps 50]

Each step takes a group of completions per prompt and rewards each one. A completion's advantage is its reward minus the
group's mean, divided by the group's standard deviation (Shao et al., 2024, "DeepSeekMath", section 4.1). The trainer is
transformers and PyTorch. nanovllm generates, says how probable each token was under the weights that drew it, and takes
the new weights in place. A loop of your own differs in its prompts, its reward, and the size of its model.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY

PROMPTS = ["Say something:", "A word, please:", "Tell me more about it.", "Go on:"]
GROUP, NUM_TOKENS, CLIP = 16, 12, 0.2


def reward(text: str) -> float:
    """The share of vowels in a completion."""
    return sum(character in "aeiou" for character in text) / NUM_TOKENS


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[num_prompts, group] -> the same shape."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss_of(model, outputs: list[RequestOutput], advantage: torch.Tensor) -> torch.Tensor:
    """The clipped policy loss, with the probabilities that nanovllm drew the tokens from as the old policy."""
    losses = []
    for output, of_group in zip(outputs, advantage, strict=True):
        completions = torch.tensor([each.token_ids for each in output.outputs])
        old = torch.stack([torch.from_numpy(each.logprobs.of_tokens.copy()) for each in output.outputs])
        prompts = torch.tensor(output.prompt_token_ids).expand(len(completions), -1)
        logits = model(torch.cat([prompts, completions], 1)).logits[:, prompts.shape[1] - 1 : -1]
        new = logits.float().log_softmax(-1).gather(2, completions[..., None])[..., 0]
        ratio = (new - old).exp()
        gains = ratio * of_group[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * of_group[:, None]
        losses.append(-torch.minimum(*gains).mean())
    return torch.stack(losses).mean()


def run(num_steps: int, seed: int = 0) -> list[float]:
    """Returns the mean reward of each step. After every five steps it prints their mean."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    # "processed" log-probabilities are those of the distribution that the tokens are drawn from.
    params = SamplingParams(
        n=GROUP, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, logprobs_mode="processed"
    )
    means: list[float] = []
    print(f"{num_steps} steps, each with {GROUP} completions of {len(PROMPTS)} prompts; loading the model", flush=True)
    with LLM(MODEL_DIRECTORY, device="cpu", num_kvcache_blocks=256, seed=seed) as llm:
        for step in range(num_steps):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            rewards = torch.tensor([[reward(each.text) for each in output.outputs] for output in outputs])
            means.append(float(rewards.mean()))
            optimizer.zero_grad()
            loss_of(model, outputs, advantages(rewards)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(model.named_parameters())
            if (step + 1) % 5 == 0 or step + 1 == num_steps:
                last = means[step // 5 * 5 :]
                print(f"step {step + 1:3} of {num_steps}: mean reward {sum(last) / len(last):.3f}", flush=True)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    run(parser.parse_args().steps)


if __name__ == "__main__":
    main()
