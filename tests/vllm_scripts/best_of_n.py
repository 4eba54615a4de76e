"""Best of n: the sample with the highest log-probability per token."""

import argparse

from vllm import LLM, SamplingParams


def length_normalized(sample):
    return sample.cumulative_logprob / max(len(sample.token_ids), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-1.7B-Instruct")
    parser.add_argument("-n", type=int, default=4)
    args = parser.parse_args()

    llm = LLM(args.model, dtype="float32", enforce_eager=True, max_model_len=256, seed=1234)
    sampling = SamplingParams(n=args.n, temperature=1.0, max_tokens=24, logprobs=0, presence_penalty=0.0)
    prompts = ["Q: Reverse the word garden.\nA:", "Q: Sort the letters of window.\nA:"]
    for request_output in llm.generate(prompts, sampling, use_tqdm=False):
        ranked = sorted(request_output.outputs, key=length_normalized, reverse=True)
        total = sum(
            position[token].logprob for token, position in zip(ranked[0].token_ids, ranked[0].logprobs, strict=True)
        )
        assert abs(total - ranked[0].cumulative_logprob) < 1e-3
        print([sample.index for sample in request_output.outputs], ranked[0].text.strip())
