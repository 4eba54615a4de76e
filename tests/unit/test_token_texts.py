"""The texts of logprobs' tokens join to the text, where a character is spread over several tokens too."""

import copy
import pickle
import random

import numpy as np
import pytest
from support.small_tokenizers import small_tokenizers

from nanovllm import LLM, SamplingParams, TokenLogprobs
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.text import Completion, Text

TOKENIZERS = small_tokenizers()
PADDING = 5  # ids that the model's vocabulary has and the tokenizer lacks


@pytest.fixture(params=TOKENIZERS)
def text(request) -> Text:
    return Text(TOKENIZERS[request.param])


def scored(text: Text, ids: list[int], follows: bool = True, skips: bool = True, others=None) -> TokenLogprobs:
    """The log-probabilities of `ids`; `others` has the most probable tokens at each place."""
    table = np.array([[own, *rest] for own, rest in zip(ids, others or [[]] * len(ids), strict=True)], np.int32)
    pieces = text.pieces(SamplingParams(skip_special_tokens=skips), follows)
    return TokenLogprobs(table, np.zeros(table.shape, np.float32), np.ones(len(ids), np.int32), 0, pieces)


def own(found: TokenLogprobs) -> list:
    """The entries of the tokens that are in the text."""
    entries = [next(iter(each.values())) for each in found]
    return [each for each in entries if each.token_bytes is not None]


def joined(found: TokenLogprobs) -> str:
    return "".join(each.decoded_token for each in own(found))


def random_ids(text: Text, rng: random.Random, changes=(0.0, 0.1, 0.5)) -> list[int]:
    """Tokens of random text, some of which are replaced by random ids."""
    characters = rng.choices(["a", "b", " ", "é", "€", "😀", "\n", "the cat", "  "], k=rng.randint(1, 8))
    ids = text.tokenizer("".join(characters), add_special_tokens=False)["input_ids"] or [0]
    size = len(text.tokenizer) + PADDING
    change = rng.choice(changes)
    return [rng.randrange(size) if rng.random() < change else token_id for token_id in ids]


def test_texts_join_to_the_text_and_bytes_to_its_bytes(text):
    """Each token of an emoji had the text U+FFFD."""
    rng, num_broken = random.Random(0), 0
    for _ in range(600):
        ids, follows, skips = random_ids(text, rng), rng.random() < 0.5, rng.random() < 0.7
        params = SamplingParams(skip_special_tokens=skips)
        ((whole, _),) = text.complete([Completion(ids, params, follows)])
        found = scored(text, ids, follows, skips)
        assert joined(found) == whole, (ids, follows, skips)
        in_bytes = b"".join(each.token_bytes for each in own(found))
        if "\ufffd" not in whole:
            assert in_bytes == whole.encode()
        num_broken += "\ufffd" in whole
    assert num_broken > 20 or "▁" in text.tokenizer.get_vocab()


def test_a_character_belongs_to_the_token_that_completes_it(text):
    rng = random.Random(1)
    for _ in range(100):
        whole = "".join(rng.choices(["a", " ", "é", "€", "😀", "b"], k=4))
        ids = text.tokenizer(whole, add_special_tokens=False)["input_ids"]
        so_far = complete = ""
        for number, entry in enumerate(own(scored(text, ids)), 1):
            so_far += entry.decoded_token
            (until,) = text.decode([ids[:number]], True, [True])
            complete = complete if "\ufffd" in until else until
            assert so_far == complete


def test_another_token_has_the_text_that_it_would_have_there(text):
    rng, num_unfinished = random.Random(2), 0
    for _ in range(150):
        ids, follows = random_ids(text, rng, changes=(0.0,)), rng.random() < 0.5
        others = [rng.sample(range(len(text.tokenizer)), 3) for _ in ids]
        for index, entries in enumerate(scored(text, ids, follows, others=others)):
            for other in set(others[index]) - {ids[index]}:
                _, _, expected, in_bytes = scored(text, [*ids[:index], other], follows)[index][other]
                alone = text.piece(other, True, True).text
                if "\ufffd" in expected and "\ufffd" in alone and in_bytes != alone.encode():
                    expected = "bytes:" + "".join(f"\\x{byte:02x}" for byte in in_bytes)
                    num_unfinished += 1
                elif "\ufffd" in expected:
                    expected = alone
                assert entries[other][2:] == (expected, in_bytes)
    assert num_unfinished > 10 or "€" not in text.decode(text.encode_texts(["€"], False), True)


def test_parts_of_a_character_are_told_apart():
    text = Text(TOKENIZERS["bytes"])
    smile = list("😀".encode())
    found = scored(text, smile, others=[[0xE2, 0x80]] + [[0x61, 0x62]] * 2 + [[0x81, 0x61]])
    assert [entry.decoded_token for entry in own(found)] == ["", "", "", "😀"]
    assert [entry.token_bytes for entry in own(found)] == [bytes([byte]) for byte in smile]
    assert [entry.decoded_token for entry in found[0].values()] == ["", "bytes:\\xe2", "bytes:\\x80"]
    assert [entry.decoded_token for entry in found[3].values()] == ["😀", "😁", "a"]


@pytest.mark.parametrize("skips", [True, False])
def test_a_special_token_that_the_text_leaves_out_has_a_name_and_no_bytes(skips):
    tokenizer = TOKENIZERS["byte-level BPE"]
    eos, (a,) = tokenizer.eos_token_id, tokenizer("a")["input_ids"]
    found = scored(Text(tokenizer), [a, eos, len(tokenizer) + 1], skips=skips)
    assert [next(iter(each.values())).decoded_token for each in found] == ["a", "<eos>", ""]
    assert [next(iter(each.values())).token_bytes for each in found] == [b"a", None if skips else b"<eos>", None]


def test_a_token_may_look_like_a_byte():
    tokenizer = copy.deepcopy(TOKENIZERS["byte-level BPE"])
    tokenizer.add_tokens(["<0x41>", "�"])
    ids = tokenizer("<0x41>�", add_special_tokens=False)["input_ids"]
    assert [entry.token_bytes for entry in own(scored(Text(tokenizer), ids))] == [b"<0x41>", "�".encode()]


def test_texts_are_found_when_an_item_is_read_and_survive_pickling(text):
    ids = text.tokenizer("a 😀 b", add_special_tokens=False)["input_ids"]
    asked = []
    table = np.array(ids, np.int32)[:, None]
    lazy = TokenLogprobs(table, np.zeros_like(table, np.float32), table[:, 0], 0, asked.append)
    assert lazy.of_tokens.sum() == 0 and not asked
    assert lazy[0][ids[0]].decoded_token is None and asked
    pieces = text.pieces(SamplingParams(), False)
    found = TokenLogprobs(table, np.zeros_like(table, np.float32), table[:, 0], 0, pieces)
    assert list(pickle.loads(pickle.dumps(found))) == list(found)
    assert len(found[0]) == 1 and joined(found) == text.decode([ids], True)[0]


def test_an_llms_logprobs_join_to_its_text():
    forced = {"structured_outputs": {"choice": ["a😀é"]}, "logprobs": 3}
    with LLM(MODEL_DIRECTORY, device="cpu", max_model_len=64) as llm:
        whole, cut = llm.generate(
            ["Sum:"] * 2, [SamplingParams(**forced), SamplingParams(**forced, stop="😀")], use_tqdm=False
        )
    assert whole.text == joined(whole.outputs[0].logprobs) == "a😀é"
    assert cut.text == "a" and joined(cut.outputs[0].logprobs) == "a😀"
