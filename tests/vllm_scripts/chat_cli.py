"""Chats with a model; every engine option is an option of the command line."""

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser(description="Offline chat")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="meta-llama/Llama-3.2-1B-Instruct")
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    sampling_group.add_argument("--top-p", type=float)
    sampling_group.add_argument("--top-k", type=int)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def main(args: dict):
    max_tokens = args.pop("max_tokens")
    temperature = args.pop("temperature")
    top_p = args.pop("top_p")
    top_k = args.pop("top_k")
    chat_template_path = args.pop("chat_template_path")

    llm = LLM(**args)

    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if temperature is not None:
        sampling_params.temperature = temperature
    if top_p is not None:
        sampling_params.top_p = top_p
    if top_k is not None:
        sampling_params.top_k = top_k

    chat_template = None
    if chat_template_path is not None:
        with open(chat_template_path) as f:
            chat_template = f.read()

    conversation = [
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Which is larger, 47 or 385?"},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=chat_template)
    print("one:", outputs[0].outputs[0].text)

    conversations = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(20, 25)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True, tools=None, chat_template=chat_template)
    print("many:", [output.outputs[0].text for output in outputs])


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
