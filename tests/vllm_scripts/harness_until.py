"""Answers requests as an evaluation harness makes them: contexts with stop strings of their own, grouped by them."""

import argparse
from collections import defaultdict

from vllm import LLM, SamplingParams

REQUESTS = [
    ("Q: Count from 3 to 7.\nA:", {"until": [" 6", "\n"], "max_gen_toks": 24}),
    ("Q: What is 12 + 30?\nA:", {"until": ["\n"], "max_gen_toks": 16, "temperature": 0.0}),
    ("Q: Count from 40 to 44.\nA:", {"until": [" 6", "\n"], "max_gen_toks": 24}),
    (
        "Q: What is 1 + 1?\nA: 2\n" * 20 + "Q: Reverse the word table.\nA:",
        {"until": ["a", "\n"], "max_gen_toks": 16, "do_sample": False},
    ),
    ("Q: Reverse the word cache.\nA:", {"until": ["\n"], "max_gen_toks": 16, "temperature": 0.0}),
]


class VLLM:
    def __init__(self, pretrained, batch_size="auto", max_gen_toks=64, **kwargs):
        self.model = LLM(model=pretrained, tokenizer=None, tokenizer_mode="auto", revision=None, seed=1234, **kwargs)
        self.tokenizer = self.model.get_tokenizer()
        self.batch_size = batch_size
        self._max_gen_toks = max_gen_toks

    @property
    def max_length(self):
        return self.model.llm_engine.model_config.max_model_len

    def modify_gen_kwargs(self, kwargs):
        kwargs = dict(kwargs)
        do_sample = kwargs.pop("do_sample", None)
        if do_sample is False and "temperature" not in kwargs:
            kwargs["temperature"] = 0.0
        kwargs.setdefault("temperature", 0.0)
        kwargs["skip_special_tokens"] = kwargs.get("skip_special_tokens", False)
        kwargs["spaces_between_special_tokens"] = kwargs.get("spaces_between_special_tokens", True)
        return kwargs

    def generate_until(self, requests):
        groups = defaultdict(list)
        for i, (context, gen_kwargs) in enumerate(requests):
            groups[repr(sorted(gen_kwargs.items()))].append((i, context, gen_kwargs))
        results = [None] * len(requests)
        for group in groups.values():
            group.sort(key=lambda x: -len(x[1]))
            kwargs = dict(group[0][2])
            until = kwargs.pop("until")
            max_gen_toks = kwargs.pop("max_gen_toks", self._max_gen_toks)
            eos = self.tokenizer.decode(self.tokenizer.eos_token_id)
            max_ctx_len = self.max_length - max_gen_toks
            context_encoding = self.tokenizer([c for _, c, _ in group], add_special_tokens=False).input_ids
            context_encoding = [x[-max_ctx_len:] for x in context_encoding]
            params = SamplingParams(max_tokens=max_gen_toks, stop=[*until, eos], **self.modify_gen_kwargs(kwargs))
            outputs = self.model.generate(
                prompt_token_ids=context_encoding, sampling_params=params, use_tqdm=self.batch_size == "auto"
            )
            for (i, _, _), output in zip(group, outputs, strict=True):
                results[i] = output.outputs[0].text
        return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="EleutherAI/pythia-1.4b")
    parser.add_argument("--max_model_len", type=int, default=256)
    args = parser.parse_args()
    lm = VLLM(args.model, max_model_len=args.max_model_len, gpu_memory_utilization=0.9, max_num_seqs=8)
    print("max_length", lm.max_length)
    for result in lm.generate_until(REQUESTS):
        print(repr(result))
