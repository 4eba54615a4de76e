"""Multiple choice with few-shot examples; the answer is the most probable of the choices' tokens."""

import argparse

from vllm import LLM, SamplingParams

DEV = [
    ("How many times does the letter o appear in monkey?", "1"),
    ("How many times does the letter e appear in kernel?", "2"),
]
TEST = [
    ("How many times does the letter t appear in kitten?", ["0", "1", "2", "3"], "C"),
    ("How many times does the letter a appear in banana?", ["1", "3", "4", "5"], "B"),
    ("How many times does the letter q appear in queue?", ["1", "2", "6", "7"], "A"),
    ("How many times does the letter s appear in mississippi?", ["1", "2", "3", "4"], "D"),
]
LETTERS = "ABCD"


def gen_prompt(question, k):
    # This model has seen one question at a time.
    examples = "".join(f"Q: {q}\nA: {a}\n\n" for q, a in DEV[:k])
    return f"{examples}Q: {question}\nA: "


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", "-m", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--ntrain", "-k", type=int, default=0)
    parser.add_argument("--ngpu", "-g", type=int, default=1)
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        tensor_parallel_size=args.ngpu,
        max_model_len=1024,
        trust_remote_code=True,
        max_logprobs=100,
        disable_log_stats=True,
        use_v2_block_manager=True,
    )
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outputs = llm.generate([gen_prompt(question, args.ntrain) for question, _, _ in TEST], sampling)

    cors = []
    for (_, choices, gold), output in zip(TEST, outputs, strict=True):
        top = output.outputs[0].logprobs[0]
        lprobs = []
        for choice in choices:
            token_id = tokenizer.encode(choice, add_special_tokens=False)[-1]
            lprobs.append(top[token_id].logprob if token_id in top else -100)
        pred = LETTERS[max(range(len(choices)), key=lprobs.__getitem__)]
        decoded = {entry.decoded_token for entry in top.values() if entry.rank == 1}
        cors.append(pred == gold)
        print(pred, gold, decoded)
    print(f"Average accuracy {sum(cors) / len(cors):.3f}")


if __name__ == "__main__":
    main()
