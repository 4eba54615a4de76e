"""Trains the bundled model from nothing: a byte-level Qwen3 of about two million parameters.

    python docs/train_demo.py --out OUT [--steps 9000] [--device cuda]

Writes a checkpoint in the Hugging Face layout (config, generation_config, model.safetensors in bfloat16,
tokenizer with a chat template) and says how many of 1,000 held-out problems it answers right through
transformers' own greedy `generate`. With the default arguments that took six and a half minutes on an H200
with 16 CPU cores, and the model it made, which is the bundled one, answered all 1,000 right, run in float32
and in bfloat16. The CPU workers hand over their batches in no fixed order, so no two runs give the same weights.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanovllm.demo.problems import labelled_problems, problems

END_OF_TEXT, IM_START, IM_END = 256, 257, 258  # the ids below 256 are the bytes themselves
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROW_LENGTH = 192
LONG_ROW_LENGTH = 1024  # as long as the model takes: every LONG_ROW_EVERY-th batch has rows of this length
LONG_ROW_EVERY = 8
ROPE_THETA = 10000.0
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (token id = byte value) and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=LONG_ROW_LENGTH,
        # transformers 4 would add token_type_ids, which its generate() refuses for this model.
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_config() -> Qwen3Config:
    return Qwen3Config(  # type: ignore[call-arg]  # transformers 4 declares rope_theta, 5 accepts it undeclared
        vocab_size=259, hidden_size=160, intermediate_size=448, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=LONG_ROW_LENGTH, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=IM_END, pad_token_id=END_OF_TEXT, rope_theta=ROPE_THETA,
    )  # fmt: skip


def chat_turn(question: str, answer: str) -> tuple[list[int], list[int]]:
    asked = [IM_START, *f"user\n{question}".encode(), IM_END, *b"\n", IM_START, *b"assistant\n"]
    return asked, [*answer.encode(), IM_END]


def plain_turn(question: str, answer: str) -> tuple[list[int], list[int]]:
    return list(f"Q: {question}\nA:".encode()), [*f" {answer}".encode(), END_OF_TEXT]


def make_row(rng: random.Random, source, length: int = ROW_LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """One conversation, (token_ids, labels) of `length` each; only answers carry labels."""
    turn, separator = (chat_turn, list(b"\n")) if rng.random() < 0.8 else (plain_turn, [])
    ids: list[int] = []
    labels: list[int] = []
    while True:
        asked, answered = turn(*next(source))
        if len(ids) + len(asked) + len(answered) > length:
            break
        ids += asked + answered + separator
        labels += [-100] * len(asked) + answered + [-100] * len(separator)
    padding = length - len(ids)
    ids, labels = ids[:length] + [END_OF_TEXT] * padding, labels[:length] + [-100] * padding
    return np.array(ids, np.int16), np.array(labels, np.int16)


def _fill(seed: int, batch_size: int, queue) -> None:
    rng, source = random.Random(seed), problems(seed, held_out=False)
    for batch in itertools.count(seed):
        # A long batch has fewer rows, so that it holds as many tokens.
        length = LONG_ROW_LENGTH if batch % LONG_ROW_EVERY == 0 else ROW_LENGTH
        rows = [make_row(rng, source, length) for _ in range(max(1, batch_size * ROW_LENGTH // length))]
        queue.put((np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])))


def train(steps: int, batch_size: int, device: str, learning_rate: float, seed: int, minutes: float):
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = Qwen3ForCausalLM(build_config())
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it in a type that lost `self`
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=64)
    workers = [
        context.Process(target=_fill, args=(seed * 1000 + i, batch_size, queue), daemon=True)
        for i in range(max(1, multiprocessing.cpu_count() - 2))
    ]
    for worker in workers:
        worker.start()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate, betas=(0.9, 0.98), fused=device != "cpu",
    )  # fmt: skip

    def loss_of(ids, labels):
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
            logits = model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    if device != "cpu":
        loss_of = torch.compile(loss_of, dynamic=False)
    began = time.time()
    for step in range(steps):
        # Progress is the larger of steps and minutes spent, so that the rate reaches zero in either limit.
        progress = max(step / steps, (time.time() - began) / (60 * minutes))
        if progress >= 1:
            break
        rate = learning_rate * min(1.0, step / 300) * min(1.0, (1 - progress) / 0.6)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = map(torch.from_numpy, queue.get(timeout=120))
        if device != "cpu":  # copies from pinned memory do not hold up the launches of the next step
            ids, labels = (array.pin_memory().to(device, non_blocking=True) for array in (ids, labels))
        loss = loss_of(ids.long(), labels.long())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            print(f"step {step} loss {loss.item():.5f} rate {rate:.2e} {time.time() - began:.0f} s", flush=True)
    for worker in workers:
        worker.terminate()
    return model


def save(model, tokenizer, out: Path) -> None:
    """Writes the checkpoint so that transformers 4.56 and 5 can both read it."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner alone

    def edit(name: str, changes: dict, dropped: tuple[str, ...] = ()) -> None:
        content = json.loads((out / name).read_text()) | changes
        content = {key: content[key] for key in sorted(content) if key not in dropped}
        (out / name).write_text(json.dumps(content, indent=2) + "\n")

    # transformers 5 writes these under other names, which older readers do not know.
    edit("config.json", {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"})
    edit("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, dropped=("backend",))


@torch.inference_mode()
def evaluate(model, tokenizer, num_problems: int = 1000, seed: int = 1) -> dict[str, tuple[int, int]]:
    """Answers held-out problems by transformers' greedy `generate`, one chat turn each: kind -> (right, asked)."""
    source = labelled_problems(seed, held_out=True)
    asked = [next(source) for _ in range(num_problems)]
    score = {kind: (0, 0) for kind in sorted({kind for kind, _, _ in asked})}
    for first in range(0, num_problems, 250):
        chunk = asked[first : first + 250]
        conversations = [[{"role": "user", "content": question}] for _, question, _ in chunk]
        texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        outputs = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        answers = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for (kind, question, answer), given in zip(chunk, answers, strict=True):
            score[kind] = score[kind][0] + (given == answer), score[kind][1] + 1
            if given != answer:
                print(f"{question} -> {given!r}, not {answer!r}")
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop (well) after this long, whatever --steps says"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    model = train(args.steps, args.batch_size, args.device, args.learning_rate, args.seed, args.minutes)
    save(model.to(torch.bfloat16), tokenizer, args.out)
    saved_tokenizer = AutoTokenizer.from_pretrained(args.out)
    for dtype in (torch.float32, torch.bfloat16) if args.device != "cpu" else (torch.float32,):
        model = AutoModelForCausalLM.from_pretrained(args.out, dtype=dtype).to(args.device)
        score = evaluate(model, saved_tokenizer)
        accuracy = sum(right for right, _ in score.values()) / sum(asked for _, asked in score.values())
        print(json.dumps({"run_in": str(dtype), "accuracy": accuracy, "right_of_asked": score}))


if __name__ == "__main__":
    main()
