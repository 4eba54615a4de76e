"""Classifies a few texts with a model that has a classification head."""

from argparse import Namespace

from vllm import LLM, ClassificationRequestOutput, EngineArgs, PoolingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

TEXTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def parse_args() -> Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="jason9693/Qwen2.5-1.5B-apeach", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    for text, output in zip(TEXTS, llm.classify(TEXTS), strict=True):
        assert isinstance(output, ClassificationRequestOutput)
        probs = output.outputs.probs
        print(f"{text!r}: {[round(prob, 4) for prob in probs]} (size={output.outputs.num_classes})")
    (raw,) = llm.classify(TEXTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    print("Logits:", [round(logit, 4) for logit in raw.outputs.probs])


if __name__ == "__main__":
    main(parse_args())
