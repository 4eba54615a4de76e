"""Translates the lines of a text file; the languages here are lower and upper case."""

import argparse
from pathlib import Path

import numpy as np
import vllm

PROMPT = "Q: Write {source} in upper case.\nA:"


def read_lines(path):
    return [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="haoranxu/ALMA-7B-R")
    parser.add_argument("--src", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()

    sources = np.array(read_lines(args.src))
    lengths = np.array([len(source) for source in sources])
    order = np.argsort(-lengths, kind="stable")

    model = vllm.LLM(model=args.model, max_model_len=256, dtype="half" if args.model.endswith("-AWQ") else "auto")
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=int(2 * lengths.max()), stop=["\n"], skip_special_tokens=True
    )

    translations = np.empty(len(sources), dtype=object)
    for start in range(0, len(order), args.batch):
        chosen = order[start : start + args.batch]
        prompts = np.array([PROMPT.format(source=source) for source in sources[chosen]])
        outputs = model.generate(prompts=prompts, sampling_params=params, use_tqdm=False)
        translations[chosen] = [output.outputs[0].text.strip() for output in outputs]

    with open(args.out, "w", encoding="utf-8") as f:
        for source, translation in zip(sources, translations, strict=True):
            f.write(f"{source}\t{translation}\n")
    print("translated", len(sources), "lines")


if __name__ == "__main__":
    main()
