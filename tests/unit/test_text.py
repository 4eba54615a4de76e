"""Text: how the tokenizer treats prompts, bad words and stop strings. test_llm.py tests them through an LLM."""

import copy
import random
from types import SimpleNamespace

import pytest
from support.small_tokenizers import small_tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.prompts import EncodedPrompt
from nanovllm.text import Completion, StopStrings, Text


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return small_tokenizers()


# Texts in context


@pytest.mark.parametrize("name", ["bytes", "byte-level BPE", "SentencePiece", "stripping"])
def test_a_completions_text_is_what_it_adds_to_the_prompts(tokenizers, name):
    """Decoders of Llama 2's and Mistral's kind drop the first space: of a completion too, which broke indented code."""
    tokenizer = tokenizers[name]
    text, params = Text(tokenizer), SamplingParams()
    num_spaces = 0
    for whole in ("the cat in the hat", "in  the   cat", "the cat\n    the hat", "a é ü the", "the"):
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        for cut_at in range(1, len(ids)):
            before, after = tokenizer.decode(ids[:cut_at]), tokenizer.decode(ids)
            if not after.startswith(before):  # a cut within a character
                continue
            completion = Completion(ids[cut_at:], params, text.follows_text(ids[:cut_at], params))
            assert text.complete([completion]) == [(after[len(before) :], None)], (whole, cut_at)
            num_spaces += after[len(before)] == " "
    assert num_spaces > 5


@pytest.mark.parametrize("name", ["SentencePiece", "stripping"])
def test_a_completion_behind_nothing_begins_a_text(tokenizers, name):
    tokenizer = tokenizers[name]
    text, ids = Text(tokenizer), tokenizer("the cat", add_special_tokens=False)["input_ids"]
    special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    for prompt in ([], special):
        assert not text.follows_text(prompt, SamplingParams())
    assert text.complete([Completion(ids, SamplingParams(), False)]) == [("the cat", None)]
    choice = SamplingParams(structured_outputs={"choice": ["the cat", "a hat"]})
    assert not text.follows_text(ids, choice), "a choice begins a text of its own"
    assert text.follows_text([], SamplingParams(structured_outputs={"regex": " the cat"})), "every space counts"
    assert not text.follows_text(ids, SamplingParams(detokenize=False))


@pytest.mark.parametrize("name", ["SentencePiece", "stripping"])
def test_a_stop_string_may_begin_with_the_space_before_the_first_word(tokenizers, name):
    tokenizer = tokenizers[name]
    text, params = Text(tokenizer), SamplingParams(stop=" the")
    ids = tokenizer("cat the", add_special_tokens=False)["input_ids"]
    (at,) = [index for index in range(1, len(ids)) if tokenizer.decode(ids[:index]) == "cat"]
    predicate = text.stop_strings(params, text.follows_text(ids[:at], params))
    assert [predicate(token_id) for token_id in ids[at:]][-1]
    assert text.complete([Completion(ids[at:], params, True)]) == [("", " the")]


@pytest.mark.parametrize("name", ["SentencePiece", "stripping"])
def test_a_stop_string_is_found_where_the_window_begins_within_the_text(tokenizers, name):
    """The window's first space was dropped if tokens before it did not count."""
    tokenizer = tokenizers[name]
    text, ids = Text(tokenizer), tokenizer("a cat the hat", add_special_tokens=False)["input_ids"]
    for min_tokens in range(len(ids)):
        params = SamplingParams(stop=[" t", " cat", " hat"], min_tokens=min_tokens)
        predicate, whole = text.stop_strings(params), ""
        for number, token_id in enumerate(ids, 1):
            whole = tokenizer.decode(ids[:number])
            start = len(tokenizer.decode(ids[:min_tokens]))
            assert predicate(token_id) == any(stop in whole[start:] for stop in params.stop), (min_tokens, number)
            if any(stop in whole[start:] for stop in params.stop):
                break


def test_a_tokenizer_without_the_letter_a_decodes(tmp_path):
    backend = Tokenizer(models.WordLevel({"b": 0, "c": 1}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    text = Text(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not text.follows_text([0], SamplingParams())
    assert text.complete([Completion([0, 1], SamplingParams())]) == [("b c", None)]


@pytest.mark.parametrize("skips", [True, False])
def test_a_special_token_may_be_a_stop_string(tokenizers, skips):
    """With `skip_special_tokens`, which is the default, the text never holds it, so nothing stopped there."""
    tokenizer = tokenizers["byte-level BPE"]
    a = tokenizer.convert_tokens_to_ids("<a>")
    text, cat = Text(tokenizer), tokenizer("the cat")["input_ids"]
    params = SamplingParams(stop=["x", "<a>"], skip_special_tokens=skips)
    predicate = text.stop_strings(params)
    assert [predicate(token_id) for token_id in [*cat, a]] == [False] * len(cat) + [True]
    assert text.complete([Completion([*cat, a], params), Completion(cat, params)]) == [
        ("the cat", "<a>"),
        ("the cat", None),
    ]
    later = SamplingParams(stop="<a>", min_tokens=len(cat) + 1, skip_special_tokens=skips)
    predicate = text.stop_strings(later)
    assert not any(predicate(token_id) for token_id in [*cat, a])
    assert text.complete([Completion([*cat, a], later)])[0][1] is None


def test_a_text_that_begins_with_the_bos_gets_no_second_one(tokenizers):
    """A chat template that a script applies by itself writes one already."""
    tokenizer = copy.deepcopy(tokenizers["byte-level BPE"])
    bos = tokenizer.convert_tokens_to_ids("<b>")
    tokenizer.bos_token = "<b>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<b> $A", special_tokens=[("<b>", bos)]
    )
    text, ids = Text(tokenizer), tokenizer("the cat", add_special_tokens=False)["input_ids"]
    assert text.encode_texts(["the cat", "<b>the cat", "<b>"], True) == [[bos, *ids], [bos, *ids], [bos]]
    assert text.encode_texts(["<b>the cat"], False) == [[bos, *ids]]
    split = text.encode_texts(["<b>the cat"], True, splits_special=True)[0]
    assert split[0] == bos and bos not in split[1:]


def test_an_llm_gives_texts_in_context(tokenizers, tmp_path):
    tokenizer = tokenizers["stripping"]
    tokenizer.save_pretrained(tmp_path)
    space, *_ = tokenizer(" the", add_special_tokens=False)["input_ids"]
    forced = {"temperature": 0, "logit_bias": {space: 100}, "max_tokens": 3, "logprobs": 0}
    word = tokenizer.decode([tokenizer("a", add_special_tokens=False)["input_ids"][0], space])[1:]
    assert word[0] == " "
    params = [SamplingParams(**forced), SamplingParams(**forced, stop=word)]
    with LLM(MODEL_DIRECTORY, tokenizer=tmp_path, device="cpu", max_model_len=64) as llm:
        whole, stopped = llm.generate(["a cat"] * 2, params, use_tqdm=False)
        (alone,) = llm.generate([[tokenizer.eos_token_id]], params[0], use_tqdm=False)
        (silent,) = llm.generate("a cat", SamplingParams(**forced, detokenize=False), use_tqdm=False)
    assert whole.text == word * 3 and [each[space].decoded_token for each in whole.outputs[0].logprobs] == [word] * 3
    assert stopped.text == "" and stopped.finish_reason == "stop" and len(stopped.token_ids) == 1
    assert alone.text == (word * 3)[1:], "behind no text it begins one"
    assert [each[space].decoded_token for each in alone.outputs[0].logprobs] == [word[1:], word, word]
    assert silent.text == "" and silent.outputs[0].logprobs[0][space].decoded_token == word


# Bad words


def vllm_bad_words(tokenizer, bad_words: list[str]) -> tuple[tuple[int, ...], ...]:
    """vLLM's SamplingParams.update_from_tokenizer, written down."""
    found: list[list[int]] = []
    for bad_word in bad_words:
        for add_prefix_space in (False, True):
            prompt = (" " if add_prefix_space else "") + bad_word.lstrip()
            ids = tokenizer.encode(text=prompt, add_special_tokens=False)
            if not add_prefix_space or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return tuple(map(tuple, found))


@pytest.mark.parametrize("name", ["bytes", "byte-level BPE", "SentencePiece"])
def test_bad_words_become_the_token_ids_that_vllm_bans(tokenizers, name):
    """A word has different tokens after a space and at the start of a text; banning only one has no effect."""
    tokenizer, rng = tokenizers[name], random.Random(name)
    text = Text(tokenizer)
    words = ["cat", " cat", "hat", "  the", "uncommon", "a", "the cat", "cats\n"]
    words += ["".join(rng.choices("theacno ", k=rng.randint(1, 6))).rstrip() or "x" for _ in range(200)]
    for word in words:
        assert text.bad_words_as_ids([word]) == vllm_bad_words(tokenizer, [word]), word
    together = text.bad_words_as_ids(words)
    assert together == tuple(ids for word in words for ids in text.bad_words_as_ids([word]))
    has_pairs = len(together) > len(words)
    assert has_pairs == (name == "byte-level BPE"), "elsewhere a space is a token of its own, or always there"


def test_bad_words_that_are_ids_stay_as_they_are(tokenizers):
    assert Text(tokenizers["bytes"]).bad_words_as_ids([(5, 6), "ab", (7,)]) == ((5, 6), (97, 98), (7,))


@pytest.mark.parametrize("word", [" ", "\n", "\t \n"])
def test_a_bad_word_may_be_nothing_but_spaces(tokenizers, word):
    """Without its leading spaces, which vLLM strips, it has no tokens; vLLM raises an IndexError."""
    text = Text(tokenizers["bytes"])
    assert text.bad_words_as_ids([word])[0] == tuple(word.encode())


def test_bad_words_and_stop_strings_without_a_tokenizer_are_errors():
    text = Text(None)
    assert text.bad_words_as_ids([(1, 2)]) == ((1, 2),)
    with pytest.raises(ValueError, match="no tokenizer; give bad_words as lists of token ids"):
        text.bad_words_as_ids([(1, 2), "word"])
    with pytest.raises(ValueError, match="no tokenizer, so stop strings cannot be found; use stop_token_ids"):
        text.stop_strings(SamplingParams(stop="x"))


@pytest.fixture(params=[models.WordLevel({"known": 0}), models.BPE({"k": 0}, [])], ids=["raises", "drops"])
def ignorant(request) -> Text:
    """Tokenizers without a token for unknown text: one raises a bare Exception, the other drops the text."""
    tokenizer = Tokenizer(request.param)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Text(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_a_bad_word_that_the_tokenizer_does_not_know_is_an_error(ignorant):
    """An empty list of tokens would ban nothing, or everything."""
    assert ignorant.bad_words_as_ids(["known"]) == ((0,),)
    with pytest.raises(ValueError, match="the tokenizer has no tokens for the bad word 'odd'"):
        ignorant.bad_words_as_ids(["odd"])


def test_a_prompt_that_the_tokenizer_does_not_know_spares_the_others(ignorant):
    """An error that was not a ValueError once ended the whole call."""
    first, bad, second = ignorant.encode(["known", "odd", "known"])
    assert first == second == EncodedPrompt("known", [0])
    assert bad == EncodedPrompt("odd", []) or "cannot be tokenized: WordLevel error" in str(bad.error)


# Stop strings


def stop_at(says_stop: StopStrings, token_ids: list[int]) -> int | None:
    """The number of tokens that it had seen when it said stop; None if it did not."""
    return next((index + 1 for index, token_id in enumerate(token_ids) if says_stop(token_id)), None)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("name", ["bytes", "byte-level BPE", "SentencePiece"])
def test_stop_strings_are_found_where_the_whole_text_has_them(tokenizers, name, skips):
    """The reference decodes everything after every token, tokens without text among them; the window sees a few."""
    tokenizer, rng = tokenizers[name], random.Random(f"{name} {skips}")
    text = Text(tokenizer)
    num_found = 0
    for _ in range(150):
        said = " ".join(rng.choices(["the", "cat", "sat", "é", "on", "mat", "😀", "hat"], k=6))
        token_ids = []
        for token_id in tokenizer(said, add_special_tokens=False)["input_ids"]:
            textless = [len(tokenizer) + 3, 10**6, *(() if not skips else tokenizer.added_tokens_decoder)]
            token_ids += [token_id, *rng.choices(textless, k=rng.choice((0, 0, 0, 1, 30)))]
        start = rng.randrange(len(said))
        stop = [said[start : start + rng.randint(1, 9)], "zz"]
        expected = next(
            (
                end
                for end in range(1, len(token_ids) + 1)
                if any(one in text.decode([token_ids[:end]], skips)[0] for one in stop)
            ),
            None,
        )
        params = SamplingParams(stop=stop, skip_special_tokens=skips)
        assert stop_at(StopStrings(text, params), token_ids) == expected, (said, stop)
        num_found += expected is not None
    assert num_found > 100


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("whole", "stop"), [("한글€😀", "😀"), ("ありがとう。はい", "。"), ("日本語\n\n", "\n\n")])
def test_a_stop_string_is_found_among_characters_in_several_tokens(tokenizers, whole, stop, skips):
    """A window may cut a character; byte fallback then decodes every byte of it as U+FFFD."""
    tokenizer = tokenizers["byte fallback"]
    text, ids = Text(tokenizer), tokenizer(whole, add_special_tokens=False)["input_ids"]
    params = SamplingParams(stop=stop, skip_special_tokens=skips)
    at = stop_at(text.stop_strings(params, True), ids)
    assert at is not None and stop in tokenizer.decode(ids[:at]) and stop not in tokenizer.decode(ids[: at - 1])
    cut = whole[: whole.index(stop)]
    assert text.complete([Completion(ids[:at], params, True)])[0][0].lstrip(" ") == cut
    # A stray byte at the beginning is in the text.
    stray = tokenizer.convert_tokens_to_ids(["<0xAA>", "▁"])
    params = SamplingParams(stop=" ", skip_special_tokens=skips)
    assert stop_at(text.stop_strings(params, False), stray) == 2
    # The first character is spread over tokens before and after `min_tokens`.
    ids = tokenizer("😀b", add_special_tokens=False)["input_ids"]
    params = SamplingParams(stop="b", min_tokens=len(ids) - 3, skip_special_tokens=skips)
    assert stop_at(text.stop_strings(params, True), ids) == len(ids)
    assert text.complete([Completion(ids, params, True)])[0][1] == "b"


def test_a_choice_comes_back_as_it_was_given(tokenizers):
    """SentencePiece strips a space from it. A part of a choice is not another choice."""
    text, choices = Text(tokenizers["stripping"]), [" the", "a", "  a"]
    for choice in choices:
        params = SamplingParams(structured_outputs={"choice": choices})
        ids = text.tokenizer(choice, add_special_tokens=False)["input_ids"]
        for end in ([], [text.tokenizer.eos_token_id]):
            assert text.complete([Completion([*ids, *end], params)]) == [(choice, None)]
    text = Text(tokenizers["bytes"])
    for choices, tokens, stop, expected in [
        (["yes no", " yes"], b"yes no", " no", "yes"),
        ([" a", "ab"], b"a", None, "a"),
        (["yes", "  "], b"y", "y", ""),
        (["a", "ab"], b"ab", None, "ab"),
    ]:
        params = SamplingParams(structured_outputs={"choice": choices}, stop=stop)
        assert text.complete([Completion([*tokens], params)])[0][0] == expected


def test_a_token_has_text_unless_it_adds_nothing(tokenizers):
    """A space alone, half a character, and a space that is dropped at the beginning of a text do add text."""
    for name, tokenizer in tokenizers.items():
        text, special = Text(tokenizer), set(tokenizer.added_tokens_decoder)
        assert len(special) == 3 > len(set(tokenizer.all_special_ids)), "some are not listed"
        for token_id in range(len(tokenizer)):
            assert text.has_text(token_id, False), (name, token_id)
            assert text.has_text(token_id, True) == (token_id not in special), (name, token_id)
        for token_id in (len(tokenizer), len(tokenizer) + 1000, 2**31):
            assert not text.has_text(token_id, True) and not text.has_text(token_id, False)


def test_a_stop_string_may_begin_with_the_space_that_its_tokenizer_strips():
    """SentencePiece drops the space before the first token, so the window must not begin with the stop string."""

    class Stripping(SimpleNamespace):
        def __call__(self, text, **_):
            return {"input_ids": list(text.encode())}

        def batch_decode(self, completions, **_):
            return [bytes(token_ids).decode().lstrip(" ") for token_ids in completions]

    says_stop = StopStrings(Text(Stripping()), SamplingParams(stop=" b c"))
    assert [says_stop(token_id) for token_id in b"aaaa b cd"] == [False] * 7 + [True] * 2


def test_the_search_for_stop_strings_costs_the_same_however_long_the_completion_is(tokenizers):
    """A window that grew with the tokens without text would make a long completion quadratic."""
    text = Text(tokenizers["bytes"])
    decoded = []
    decode = text.decode
    text.decode = lambda completions, *more: decoded.append(max(map(len, completions))) or decode(completions, *more)
    says_stop = StopStrings(text, SamplingParams(stop="never"))
    assert stop_at(says_stop, [*b"abcdefghijkl", *[257, 300] * 500, *b"mnopqrst"] * 3) is None
    assert max(decoded) == len(b"never") + 4
    assert len(decoded) < 3 * 20 + 50, "one per token with text, and two per token id that was new"


# Prompts and completions


def test_completions_are_cut_each_by_its_own_parameters(tokenizers):
    text = Text(tokenizers["bytes"])
    said = [*b"one, two", 258]
    params = [
        SamplingParams(),
        SamplingParams(skip_special_tokens=False),
        SamplingParams(stop=","),
        SamplingParams(stop=["two", "o"], min_tokens=1),
        SamplingParams(stop=["two", "t"], include_stop_str_in_output=True),
        SamplingParams(stop="three"),
        SamplingParams(detokenize=False),
    ]
    texts = text.complete([Completion(said, one) for one in params])
    assert texts == [
        ("one, two", None), ("one, two<|im_end|>", None), ("one", ","), ("one, ", "two"), ("one, t", "t"),
        ("one, two", None), ("", None),
    ]  # fmt: skip
    assert text.complete([]) == []


def test_without_a_tokenizer_ids_are_rows_and_strings_are_errors():
    text = Text(None)
    ids, string, nothing = text.encode([[1, 2], "words", None])
    assert ids == EncodedPrompt(None, [1, 2])
    assert string.text == "words" and "give the prompt as token ids" in str(string.error)
    assert nothing.text is None and "not None" in str(nothing.error)
    assert text.complete([([1, 2], SamplingParams())]) == [("", None)]
    assert text.eos_token_ids == ()


@pytest.mark.parametrize("prepend", ["first", "always"])
def test_splitting_special_tokens_changes_nothing_else(prepend):
    """Text was once encoded in pieces, each of which got the space that a sentencepiece tokenizer puts before the
    first; and characters that the code used itself were once taken for special tokens."""
    backend = Tokenizer(models.BPE({chr(code): code - 32 for code in range(32, 127)} | {"\u2581": 95, "?": 31}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.add_special_tokens(["<s>", "</s>", "</s>2"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "<s>{% for m in messages %}[{{ m['content'] }}]{{ '</s>' }} {% endfor %}</s>2"
    text = Text(tokenizer)
    plain = [[{"role": "user", "content": content}] for content in ("Hello, you", "a", "")]
    assert text.encode_conversations(plain, False, None, True) == text.encode_conversations(plain, False, None)
    (row,) = text.encode_conversations([[{"role": "user", "content": "see,</s>2now <s>"}]], False, None, True)
    space = ["\u2581"] if prepend == "always" else []
    expected = ["<s>", *space, *"[see,</s>2now\u2581<s>]", "</s>", "\u2581", "</s>2"]
    assert tokenizer.convert_ids_to_tokens(row.token_ids) == expected
    assert row.text == "<s>[see,</s>2now <s>]</s> </s>2"
    special = tokenizer.convert_tokens_to_ids(["<s>", "</s>", "</s>2"])
    private = "".join(map(chr, (0xE000, 0xF0000, 0xF0001, 0x100000, 0x100001)))
    (row,) = text.encode_conversations([[{"role": "user", "content": private}]], False, None, True)
    assert row == text.encode_conversations([[{"role": "user", "content": private}]], False, None)[0]
    assert [token for token in row.token_ids if token in special] == special


class Counting(PreTrainedTokenizerFast):
    """A tokenizer that records which texts it was given together."""

    calls: list[tuple[list[str], bool]]

    def __call__(self, texts, **options):
        self.calls.append((texts, options["add_special_tokens"]))
        return super().__call__(texts, **options)


def beginning_tokenizer() -> Counting:
    """A tokenizer that begins each text with <s>, as its template does."""
    backend = Tokenizer(models.BPE({chr(code): code - 32 for code in range(32, 127)}, []))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 95)])
    tokenizer = Counting(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = "<s>{{ style }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    tokenizer.calls = []
    return tokenizer


def test_conversations_are_tokenized_together_whatever_their_template_kwargs():
    """They get no special tokens of a plain text, because the template writes its own: <s> must not be doubled."""
    tokenizer = beginning_tokenizer()
    text = Text(tokenizer)
    chats = [[{"role": "user", "content": content}] for content in "abcd"]
    kwargs = [{"style": "X"}, None, {"style": "Y"}, {"style": "X"}]
    expected = [
        text.encode_conversations([chat], True, template_kwargs)[0]
        for chat, template_kwargs in zip(chats, kwargs, strict=True)
    ]
    tokenizer.calls = []
    prompts = [
        {"messages": chat, "chat_template_kwargs": template_kwargs}
        for chat, template_kwargs in zip(chats, kwargs, strict=True)
    ]
    rows = text.encode([prompts[0], "plain", prompts[1], [7], prompts[2], {"messages": 5}, prompts[3]])
    assert [rows[index] for index in (0, 2, 4, 6)] == expected
    assert [row.text for row in expected] == ["<s>X[a]", "<s>[b]", "<s>Y[c]", "<s>X[d]"]
    assert [row.token_ids.count(95) for row in rows] == [1, 1, 1, 0, 1, 0, 1]
    assert (rows[3], rows[5].error is not None) == (EncodedPrompt(None, [7]), True)
    assert tokenizer.calls == [(["plain"], True), (["<s>X[a]", "<s>[b]", "<s>Y[c]", "<s>X[d]"], False)]


def test_a_conversation_whose_special_tokens_cannot_be_split_is_its_own_error():
    """Splitting needs a tokenizer of the tokenizers library; token ids beside it do not."""
    tokenizer = SimpleNamespace(is_fast=False, chat_template="", apply_chat_template=lambda *_, **__: "Hi")
    bad, good = Text(tokenizer).encode([{"messages": [{"role": "user", "content": "Hi"}]}, [1]], splits_special=True)
    assert "split_special_tokens=True needs a model with a tokenizer.json" in str(bad.error)
    assert good == EncodedPrompt(None, [1])


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tokenizers, monkeypatch):
    """Eleven million spaces take a tokenizer's regular expression minutes or its stack, for nothing."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    text = Text(tokenizer).limited_to(10)
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    fits, long = "x" * (10 * longest), "x" * (10 * longest + 1)
    rows = text.encode([fits, long, [1, 2], "short"])
    expected = f"the prompt's {10 * longest + 1} bytes are more than max_model_len=10 tokens of at most {longest} bytes"
    assert [row.error is None for row in rows] == [True, False, True, True]
    assert str(rows[1].error).startswith(expected) and rows[1].token_ids == []
    assert rows[0].token_ids == tokenizer(fits)["input_ids"] and rows[3].token_ids == tokenizer("short")["input_ids"]
    monkeypatch.setattr(Text, "_longest_token", None)  # a tokenizer that may drop any number of spaces
    assert Text(tokenizer).limited_to(10).encode([long])[0].error is None
