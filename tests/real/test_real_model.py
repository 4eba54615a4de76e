"""A trained model, whose logits are peaked and whose answers end: `pytest -m real --real-model=DIRECTORY`.

`tests/real/make_smollm2.py` makes the directory.
"""

import json
import random
from importlib import metadata

import pytest
import torch
from support.against_transformers import teacher_forced_logits
from support.schemas import make_schemas

from nanovllm import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.real

NUM_PROMPTS, NUM_TOKENS = 200, 128
# Where two float32 logits of about 20 are closer than this, rounding decides.
TIE = 2e-4
TOPICS = [
    "rain", "the number seven", "a bicycle", "Paris", "bread", "the moon", "chess", "a river", "winter", "algebra",
    "a violin", "volcanoes", "honey", "the alphabet", "sleep", "a lighthouse", "cats", "iron", "maps", "tea",
]  # fmt: skip
FORMS = [
    "What is {}?", "Tell me a fact about {}.", "Write two sentences about {}.", "Why do people like {}?",
    "Explain {} to a child.", "Name three things that have to do with {}.", "Is {} important?",
    "Write a short poem about {}.", "Where can one find {}?", "How would you describe {} in five words?",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs(directory):
    from transformers import AutoModelForCausalLM  # slow to import

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()


def long_text() -> str:
    """The descriptions of installed packages, which are their README files."""
    texts = [str(package.metadata.get_payload()) for package in metadata.distributions()]
    return "\n\n".join(sorted(text for text in texts if len(text) > 2000))


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": form.format(topic)}] for form in FORMS for topic in TOPICS]


def raw_prompts() -> list[str]:
    rng, text = random.Random(0), long_text()
    starts = [rng.randrange(len(text) - 1000) for _ in range(NUM_PROMPTS)]
    return [text[start : start + rng.randrange(20, 800)] for start in starts]


@torch.inference_mode()
def assert_greedy(theirs, prompts: list[list[int]], outputs) -> int:
    """Asserts that transformers finds every token the most probable one after the same prompt and completion. Greedy
    search then gives the same completion. Returns the number of ties.
    """
    num_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None and output.num_prompt_tokens == len(prompt)
        ids = [*prompt, *output.token_ids]
        logits = theirs(torch.tensor([ids], device=theirs.device)).logits[0, len(prompt) - 1 : -1]
        ours = logits.gather(1, torch.tensor(output.token_ids, device=theirs.device)[:, None])[:, 0]
        gaps = logits.amax(1) - ours
        assert float(gaps.max()) < TIE, (float(gaps.max()), output.text)
        num_ties += int((gaps > 0).sum())
    return num_ties


def test_chats_and_raw_prompts_are_those_of_transformers(directory, theirs):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(directory, dtype="float32", max_model_len=2048) as llm:
        chats = llm.chat(conversations(), params, use_tqdm=False)
        raw = llm.generate(raw_prompts(), params, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    texts = tokenizer.apply_chat_template(conversations(), tokenize=False, add_generation_prompt=True)
    chat_ids, raw_ids = tokenizer(texts, add_special_tokens=False)["input_ids"], tokenizer(raw_prompts())["input_ids"]
    assert len(chats) == len(raw) == NUM_PROMPTS
    assert sum(output.finish_reason == "stop" for output in chats) > NUM_PROMPTS / 4, "answers end by themselves"
    num_ties = assert_greedy(theirs, chat_ids, chats) + assert_greedy(theirs, raw_ids, raw)
    print(f"{num_ties} ties in {sum(len(output.token_ids) for output in [*chats, *raw])} tokens")


@torch.inference_mode()
def test_the_perplexity_of_a_long_text_is_that_of_transformers(directory, theirs):
    with LLM(directory, dtype="float32", max_model_len=4096, enforce_eager=True) as llm:
        ids = llm.get_tokenizer()(long_text())["input_ids"][:20_000]
        parts = [ids[first : first + 4000] for first in range(0, len(ids), 4000)]
        ours = [teacher_forced_logits(llm, part, [1500, 1, 1499, 1000]) for part in parts]
    losses = []
    for part, logits in zip(parts, ours, strict=True):
        targets = torch.tensor(part[1:], device=logits.device)
        exact = theirs(torch.tensor([part], device=theirs.device)).logits[0].to(logits.device)
        losses.append([torch.nn.functional.cross_entropy(x[:-1].float(), targets) for x in (logits, exact)])
    our_loss, their_loss = (torch.stack(of_engine).double().mean() for of_engine in zip(*losses, strict=True))
    print(f"perplexity {float(our_loss.exp()):.6f}, transformers {float(their_loss.exp()):.6f}")
    assert len(ids) == 20_000
    assert abs(float((our_loss - their_loss).exp()) - 1) < 1e-4


def test_answers_in_bfloat16_mostly_agree_with_float32(directory):
    """Each of the first 32 tokens is predicted after those of float32, because an answer with one different word goes
    on differently.
    """
    params = SamplingParams(temperature=0, max_tokens=32)
    with LLM(directory, dtype="float32", max_model_len=2048) as llm:
        answers = [output.token_ids for output in llm.chat(conversations(), params, use_tqdm=False)]
        tokenizer = llm.get_tokenizer()
    texts = tokenizer.apply_chat_template(conversations(), tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    with LLM(directory, dtype="bfloat16", max_model_len=2048, enforce_eager=True) as llm:
        rounded = [output.token_ids for output in llm.chat(conversations(), params, use_tqdm=False)]
        after_exact = []
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = teacher_forced_logits(llm, prompt + answer, [len(prompt), *[1] * len(answer)])
            after_exact.append(logits[len(prompt) - 1 : -1].argmax(1).tolist())

    def agreeing(others: list[list[int]]) -> float:
        pairs = [pair for row in zip(answers, others, strict=True) for pair in zip(*row, strict=False)]
        return sum(exact == other for exact, other in pairs) / len(pairs)

    print(f"{agreeing(after_exact):.3f} of the first 32 tokens agree, {agreeing(rounded):.3f} without being led")
    assert agreeing(after_exact) >= 0.9


@torch.inference_mode()
def log_softmax(theirs, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab_size], on the CPU: row i is that of the token after token i."""
    return theirs(torch.tensor([ids], device=theirs.device)).logits[0].float().log_softmax(-1).cpu()


def test_log_probabilities_are_those_of_transformers(directory, theirs):
    """This compares completions, prompts and continuations, and a long text in windows, each scored once."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=32, logprobs=5, prompt_logprobs=0)
    worst = 0.0
    with LLM(directory, dtype="float32", max_model_len=2048) as llm:
        outputs = llm.chat(conversations()[::10], params, use_tqdm=False)
        for output in outputs:
            expected = log_softmax(theirs, [*output.prompt_token_ids, *output.token_ids])
            split, found = output.num_prompt_tokens, output.outputs[0].logprobs
            of_ids = expected[split - 1 : -1].gather(1, torch.from_numpy(found.token_ids).long())
            worst = max(worst, float((of_ids - torch.from_numpy(found.logprobs.copy())).abs().max()))
            targets = torch.tensor(output.prompt_token_ids[1:])[:, None]
            ours = torch.from_numpy(output.prompt_logprobs.of_tokens.copy())
            worst = max(worst, float((expected[: split - 1].gather(1, targets)[:, 0] - ours).abs().max()))
        ids = llm.get_tokenizer()(long_text())["input_ids"][:4000]
        windows = [(ids[max(0, first - 500) : first], ids[first : first + 500]) for first in range(500, 4000, 500)]
        rows = llm.loglikelihood(*map(list, zip(*windows, strict=True)), use_tqdm=False)
        for (context, continuation), row in zip(windows, rows, strict=True):
            expected = log_softmax(theirs, context + continuation)[len(context) - 1 : -1]
            own = expected.gather(1, torch.tensor(continuation)[:, None])[:, 0]
            worst = max(worst, float((own - torch.from_numpy(row.logprobs.copy())).abs().max()))
            assert row.total == pytest.approx(float(own.double().sum()), abs=1e-2)
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst < 1e-4


def test_every_json_completion_is_of_its_schema_or_was_cut(directory):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = make_schemas(NUM_PROMPTS)
    params = [
        SamplingParams(
            temperature=1.0, top_p=(1.0, 0.9)[row % 2], seed=row, n=1 + row % 3 // 2, max_tokens=200,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for row, schema in enumerate(schemas)
    ]  # fmt: skip
    asked = [
        [{"role": "user", "content": f"Answer with JSON of this schema: {json.dumps(schema)}"}] for schema in schemas
    ]
    with LLM(directory, dtype="float32", max_model_len=2048) as llm:
        outputs = llm.chat(asked, params, use_tqdm=False)
    num_valid = num_cut = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.error is None, output.error
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        for each in output.outputs:
            num_cut += each.finish_reason == "length"
            if each.finish_reason == "stop":
                checker.validate(json.loads(each.text))
                num_valid += 1
    print(f"{num_valid} valid, {num_cut} cut by max_tokens")
    assert num_valid > num_cut
