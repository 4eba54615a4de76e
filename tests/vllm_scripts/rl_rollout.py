"""Rollouts, rewards and weights: the policy is trained beside vLLM, which gets its weights after each step."""

import argparse
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.model_executor import set_random_seed as vllm_set_random_seed


def init_vllm(model_id: str, device: str, seed: int, gpu_memory_utilization: float = 0.85):
    vllm_set_random_seed(seed)
    world_size_patch = patch("torch.distributed.get_world_size", return_value=1)
    profiling_patch = patch(
        "vllm.worker.worker.Worker._assert_memory_footprint_increased_during_profiling", return_value=None
    )
    with world_size_patch, profiling_patch:
        return LLM(
            model=model_id,
            device=device,
            dtype=torch.bfloat16,
            enable_prefix_caching=True,
            enable_sleep_mode=True,
            gpu_memory_utilization=gpu_memory_utilization,
        )


def load_policy_into_vllm_instance(policy: PreTrainedModel, llm: LLM):
    state_dict = policy.state_dict()
    llm_model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    llm_model.load_weights(state_dict.items())


def rollout(llm, prompts, answers, group_size):
    params = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=16, n=group_size, stop=["\n"], min_tokens=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rewards = torch.tensor(
        [
            [float(sample.text.strip() == answer) for sample in output.outputs]
            for output, answer in zip(outputs, answers, strict=True)
        ]
    )
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)
    return rewards, advantages


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen2.5-Math-1.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--group-size", type=int, default=4)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    llm = init_vllm(args.model, args.device, seed=0)
    prompts, answers = ["Q: What is 47 + 385?\nA:", "Q: Reverse the word planet.\nA:"], ["432", "tenalp"]

    rewards, advantages = rollout(llm, prompts, answers, args.group_size)
    print("before:", rewards.mean().item() > 0.7, tuple(advantages.shape))

    llm.sleep(level=1)
    with torch.no_grad():  # a step that ruins the policy
        for layer in policy.model.layers:
            layer.mlp.down_proj.weight.zero_()
    llm.wake_up(tags=["weights"])
    load_policy_into_vllm_instance(policy, llm)
    llm.wake_up(tags=["kv_cache"])
    assert llm.reset_prefix_cache()

    rewards, advantages = rollout(llm, prompts, answers, args.group_size)
    print("after:", rewards.mean().item() > 0.7, tuple(advantages.shape))
