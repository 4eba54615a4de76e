"""The bundled model answers problems it never saw, and answers alike however the engine is set up."""

import itertools

import pytest
import torch
from support.demo_problems import CONVERSATIONS, PROBLEMS

from nanovllm import LLM
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.demo.problems import is_held_out, problems

# This many are enough to see that a way of running them changes no answer.
NUM_RUN_AGAIN = 30


def answers(num_problems: int = NUM_RUN_AGAIN, **options) -> tuple[list[list[int]], list[str], dict]:
    with LLM(str(MODEL_DIRECTORY), device="cpu", **options) as llm:
        outputs = llm.chat(CONVERSATIONS[:num_problems], use_tqdm=False)
        return [output.token_ids for output in outputs], [output.text for output in outputs], llm.metrics()


@pytest.fixture(scope="module")
def usual() -> tuple[list[list[int]], list[str], dict]:
    return answers(len(PROBLEMS))


def test_no_test_problem_can_have_been_trained_on():
    assert all(is_held_out(question) for question, _ in PROBLEMS)
    trained_on = {question for question, _ in itertools.islice(problems(seed=2, held_out=False), 5000)}
    assert not any(is_held_out(question) for question in trained_on)


def test_at_least_99_percent_of_unseen_problems_are_answered_right(usual):
    num_right = sum(text == answer for text, (_, answer) in zip(usual[1], PROBLEMS, strict=True))
    print(f"{num_right} of {len(PROBLEMS)} right")
    assert num_right >= 990


def test_a_cache_that_preempts_changes_no_answer(usual):
    token_ids, _, metrics = answers(kvcache_block_size=1, num_kvcache_blocks=140)
    assert metrics["num_preemptions"] > NUM_RUN_AGAIN / 10
    assert token_ids == usual[0][:NUM_RUN_AGAIN]


def test_chunks_of_16_tokens_change_no_answer(usual):
    token_ids, _, metrics = answers(max_num_batched_tokens=16)
    assert metrics["num_prefill_steps"] > NUM_RUN_AGAIN
    assert token_ids == usual[0][:NUM_RUN_AGAIN]


def test_no_prefix_caching_changes_no_answer(usual):
    shared = answers(kvcache_block_size=4)
    alone = answers(kvcache_block_size=4, enable_prefix_caching=False)
    assert shared[2]["num_cached_prompt_tokens"] > NUM_RUN_AGAIN and alone[2]["num_cached_prompt_tokens"] == 0
    assert shared[0] == alone[0] == usual[0][:NUM_RUN_AGAIN]


@torch.inference_mode()
def test_transformers_generate_gives_the_same_answers(usual):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32).eval()
    texts = tokenizer.apply_chat_template(CONVERSATIONS[:NUM_RUN_AGAIN], tokenize=False, add_generation_prompt=True)
    theirs = []
    for first in range(0, len(texts), 200):
        inputs = tokenizer(texts[first : first + 200], return_tensors="pt", padding=True, padding_side="left")
        outputs = model.generate(**inputs, max_new_tokens=64, do_sample=False)
        theirs += outputs[:, inputs["input_ids"].shape[1] :].tolist()
    # Padding follows the end token there.
    usual_ids = usual[0][:NUM_RUN_AGAIN]
    assert [ids[: len(ours)] for ids, ours in zip(theirs, usual_ids, strict=True)] == usual_ids
