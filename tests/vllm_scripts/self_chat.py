"""A conversation of several turns, in which each answer becomes part of the next question."""

import sys

from vllm import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "microsoft/Phi-3-mini-4k-instruct"
num_turns = int(sys.argv[2]) if len(sys.argv) > 2 else 3

llm = LLM(model, trust_remote_code=True, max_model_len=1024, gpu_memory_utilization=0.5)
greedy = SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.0)


class Agent:
    def __init__(self, name):
        self.name, self.history = name, []

    def ask(self, content):
        self.history.append({"role": "user", "content": [{"type": "text", "text": content}]})
        # Only the last exchange fits into the model's training.
        output = llm.chat(messages=self.history[-1:], sampling_params=greedy, use_tqdm=False, lora_request=None)[0]
        reply = output.outputs[0].text.strip()
        self.history.append({"role": "assistant", "content": reply})
        return reply


alice, bob = Agent("alice"), Agent("bob")
number = "12"
for turn in range(num_turns):
    agent = (alice, bob)[turn % 2]
    number = agent.ask(f"What is {number} + {number}?")
    print(f"{agent.name}: {number}")
print([len(agent.history) for agent in (alice, bob)])
