"""Rates answers with a reward model."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

QUESTION = "What is 12 + 30?"
ANSWERS = ["42", "I do not know.", "12"]


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="Skywork/Skywork-Reward-V2-Qwen3-0.6B", runner="pooling", trust_remote_code=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    template = llm.get_tokenizer().apply_chat_template
    chats = [[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    outputs = llm.reward([template(chat, tokenize=False) for chat in chats], use_tqdm=False)
    rewards = {answer: float(output.outputs.data[-1]) for answer, output in zip(ANSWERS, outputs, strict=True)}
    for answer in sorted(rewards, key=rewards.get, reverse=True):
        print(f"{rewards[answer]:.4f} {answer}")


if __name__ == "__main__":
    main(parse_args())
