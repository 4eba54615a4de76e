"""Structured outputs on the host: which ones are accepted, and that random walks through the masks follow them."""

import ast
import dataclasses
import datetime
import functools
import inspect
import itertools
import json
import pathlib
import pickle
import random
import re
import sys
import typing
from collections import Counter

import numpy as np
import pytest
from support.schemas import make_schemas
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import nanovllm
import nanovllm.accepted
import nanovllm.checks
import nanovllm.constraints
import nanovllm.guides
import nanovllm.sampling_checks
import nanovllm.sampling_params
import nanovllm.structured_outputs
from nanovllm import Config
from nanovllm.constraints import FillError, fill_masks
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.guides import Guide, StructuredOutputs
from nanovllm.ops.process_logits import pack_allowed
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text import Completion, Text

# More ids than the tokenizers have, as in models with a padded vocabulary.
VOCAB_SIZE = 500


@functools.cache
def tokenizer_of(kind):
    """bundled: one token per byte. merged: with tokens of many bytes, over the borders of JSON's parts too.
    metaspace: as SentencePiece, with a leading space that is put there and taken away, and a token that begins texts.
    fallback: the same in Llama 2's way, with a token for each byte, for characters that it lacks.
    lower: loses capitals. converted: merged, with the decoders that transformers 5.17 makes of a GGUF file."""
    if kind == "bundled":
        return AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    if kind == "fallback":
        return PreTrainedTokenizerFast(tokenizer_object=fallback_tokenizer(), eos_token="<end>", unk_token="<unk>")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    special = ["<unk>", "<end>", "<other_end>", "<pad>"]
    texts = ["yes yesterday no nothing maybe", *map(json.dumps, make_schemas(50))]
    if kind == "metaspace":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 3)])
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    else:
        if kind == "lower":
            tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        # Without the regex a whole schema is one word, which gives tokens like `":{"`.
        trainer = trainers.BpeTrainer(
            vocab_size=450, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "converted":
        of_gguf = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
        tokenizer.decoder = decoders.Sequence(of_gguf)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")


def fallback_tokenizer():
    trained = json.loads(tokenizer_of("metaspace").backend_tokenizer.to_str())["model"]
    tokens = [*list(trained["vocab"])[:4], *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in trained["vocab"] if token not in tokens][: 450 - len(tokens)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in trained["merges"] if {*pair, "".join(pair)} <= vocab.keys()]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(tokens[:4])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def eos_of(kind):
    """Two ids that end, and one that the tokenizer lacks."""
    return [257, 258, 499] if kind == "bundled" else [1, 2, 499]


@functools.cache
def outputs_of(kind):
    return StructuredOutputs(tokenizer_of(kind), VOCAB_SIZE, eos_of(kind))


def new_mask(num_rows=None):
    shape = (-(-VOCAB_SIZE // 32),)
    return np.full(shape if num_rows is None else (num_rows, *shape), 0x55555555, np.int32)  # like a used buffer


def ids_in(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def allowed_by(constraint):
    mask = new_mask()
    constraint.fill(mask)
    np.testing.assert_array_equal(mask, pack_allowed(ids_in(mask), VOCAB_SIZE))
    return ids_in(mask)


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def completed(kind, params, token_ids):
    """The text of a completion, as an LLM makes it."""
    text, params = Text(tokenizer_of(kind)), SamplingParams(structured_outputs=params)
    [(found, _)] = text.complete([Completion(token_ids, params, text.follows_text((), params))])
    return found


def walk(kind, params, rng, closes=0.6, maximum=200):
    """Generates random allowed tokens, and prefers closing ones. Returns the text, or None if it has no end."""
    tokenizer, eos, constraint = tokenizer_of(kind), eos_of(kind), outputs_of(kind).constraint(params)
    texts = texts_of(kind)
    token_ids = []
    for _ in range(maximum):
        ids = allowed_by(constraint)
        assert ids and max(ids) < len(tokenizer)
        if rng.random() < closes:
            for closing in (lambda i: i in eos, lambda i: texts[i][:1] in ("}", "]"), lambda i: texts[i][:1] == '"'):
                ids = [i for i in ids if closing(i)] or ids
                if closing(ids[0]):
                    break
        token_ids.append(rng.choice(ids))
        is_complete = constraint.advance(token_ids[-1])
        if is_complete:
            assert allowed_by(constraint) == eos[:2]
            return completed(kind, params, token_ids)
        assert token_ids[-1] not in eos
    return None


@functools.cache
def texts_of(kind):
    tokenizer = tokenizer_of(kind)
    return [decode(tokenizer, [token_id]) for token_id in range(len(tokenizer))]


# Accepted and refused values


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, ValueError, "exactly one of json, regex, choice, grammar, json_object, not none of them"),
        ({"json_object": False}, ValueError, "none of them"),
        ({"regex": "a", "choice": ["b"]}, ValueError, "not regex and choice"),
        ({"json": {}, "json_object": True}, ValueError, "not json and json_object"),
        ({"choice": "yes"}, TypeError, "choice must be a list of strings"),
        ({"choice": ["yes", 1]}, TypeError, "choice must be a list of strings"),
        ({"choice": {"yes"}}, TypeError, "choice must be a list of strings"),
        ({"choice": []}, ValueError, "at least one"),
        ({"choice": ["a", ""]}, ValueError, "empty string"),
        ({"choice": ["a", "b", "a"]}, ValueError, "'a' twice"),
        ({"choice": ["\ud800"]}, ValueError, "surrogate"),
        ({"regex": 5}, TypeError, "regex must be a string"),
        ({"regex": ""}, ValueError, "empty string"),
        ({"regex": "(a"}, ValueError, "unterminated subpattern"),
        ({"regex": "a)"}, ValueError, "unbalanced"),
        ({"regex": "[a"}, ValueError, "unterminated character set"),
        ({"regex": "*a"}, ValueError, "nothing to repeat"),
        ({"regex": "a{3,2}"}, ValueError, "min repeat greater"),
        ({"regex": "a\\"}, ValueError, "end of pattern"),
        ({"grammar": b"start: x"}, TypeError, "grammar must be a string"),
        ({"grammar": ""}, ValueError, "empty string"),
        ({"json": 5}, TypeError, "json must be a JSON schema"),
        ({"json": True}, TypeError, "json must be a JSON schema"),
        ({"json": ["object"]}, TypeError, "json must be a JSON schema"),
        ({"json": int}, TypeError, "json must be a JSON schema"),
        ({"json": "{'type': 'object'}"}, ValueError, "the string is not JSON"),
        ({"json": "[1]"}, ValueError, "json must be a JSON schema"),
        ({"json": "[" * 100_000}, ValueError, "the string is not JSON"),
        ({"json": {"enum": {1, 2}}}, TypeError, "only what JSON has"),
        ({"json": {"const": float("nan")}}, ValueError, "not a JSON schema"),
        ({"json": {"$ref": "https://json.org/x"}}, ValueError, r"'https://json.org/x'.*within the schema"),
        ({"json": '{"anyOf": [{"properties": {"a": {"$ref": "x.json#/a"}}}]}'}, ValueError, "x.json#/a"),
        ({"json_object": 1}, TypeError, "json_object must be True or False"),
        ({"regex": "a", "disable_any_whitespace": 1}, TypeError, "disable_any_whitespace must be True or False"),
        ({"guided_json": {}}, TypeError, "did you mean json"),
        ({"choices": ["a"]}, TypeError, "did you mean choice"),
        ({"regex": "a", "structural_tag": "b"}, ValueError, "structural_tag cannot be 'b'; .*write a grammar"),
        (
            {"regex": "a", "whitespace_pattern": " "},
            ValueError,
            "whitespace_pattern is for json and json_object; leave",
        ),
        ({"json": {}, "whitespace_pattern": "x"}, ValueError, "whitespace_pattern must be made of spaces, .*, not 'x'"),
        ({"json": {}, "whitespace_pattern": 5}, TypeError, "whitespace_pattern must be a string"),
        ({"json": {}, "whitespace_pattern": "[ "}, ValueError, "whitespace_pattern '\\[ ' is not valid: unterminated"),
        ({"json": {}, "disable_additional_properties": 1}, TypeError, "disable_additional_properties must be True or"),
        ({"json": {"properties": {"enum": {"$ref": "https://json.org"}}}}, ValueError, "refers to 'https://json.org'"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_at_once(given, error, says):
    with pytest.raises(error, match=says):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**63, 10**40, 1e16, -1e300])
@pytest.mark.parametrize(
    "keyword", ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
def test_a_number_that_would_be_rounded_is_refused(keyword, number):
    """llguidance reads float64: of {"const": 2**53 + 1} it made 2**53, and {"const": -2**63} crashed the process."""
    for value in (number, [1, number], {"a": [number]}):
        if not isinstance(value, dict) or keyword in ("const", "enum"):
            schema = {"anyOf": [{"type": "object", "properties": {"x": {keyword: value}}}]}
            for given in (schema, json.dumps(schema)):
                with pytest.raises(ValueError, match=rf"has {re.escape(repr(number))} in {keyword}, .*rounded; use"):
                    StructuredOutputsParams(json=given)


def test_large_numbers_elsewhere_are_nothing_to_refuse():
    """A property's name is no keyword, and annotations are not generated."""
    kept = {"default": 2**60, "examples": [2**60], "title": "x"}
    StructuredOutputsParams(json={"properties": {"maximum": {**kept, "type": "integer", "maximum": 2**53 - 1}}})


def test_a_schema_that_holds_itself_is_refused():
    schema = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(ValueError, match="Circular"):
        StructuredOutputsParams(json=schema)


@pytest.mark.parametrize("regex", [r"\p{L}+", "a**", r"(?<name>a)", "[a-z&&[^b]]", r"\x{41}", "[[:alpha:]]+"])
def test_what_only_llguidance_knows_of_regexes_is_left_to_it(regex):
    """Python's `re` refuses some of these, or warns."""
    assert StructuredOutputsParams(regex=regex).regex == regex


def test_a_reference_in_data_is_no_reference():
    for keyword in ("const", "default"):
        StructuredOutputsParams(json={keyword: {"$ref": "https://json.org/x"}})
    StructuredOutputsParams(json={"properties": {"$ref": {"type": "integer"}}})


class Person:
    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"name": {"type": "string"}}}


def test_a_schema_may_be_a_dict_or_a_string_or_a_class():
    schema = Person.model_json_schema()
    params = [StructuredOutputsParams(json=given) for given in (schema, json.dumps(schema, indent=4), Person)]
    assert params[0] == params[1] == params[2] and len(set(params)) == 1
    assert params[0].json == '{"type":"object","properties":{"name":{"type":"string"}}}'


def test_a_class_without_a_schema_is_refused():
    class Broken:
        @classmethod
        def model_json_schema(cls):
            raise RuntimeError("callables have none")

    with pytest.raises(ValueError, match="no schema of Broken: callables have none"):
        StructuredOutputsParams(json=Broken)


def test_the_order_of_properties_is_part_of_a_schema():
    first, second = ({"properties": {name: {} for name in names}} for names in ("ab", "ba"))
    assert first == second and StructuredOutputsParams(json=first) != StructuredOutputsParams(json=second)


@pytest.mark.parametrize(
    "given",
    [{"json": {"type": "null"}}, {"regex": "a"}, {"choice": ["a", "b"]}, {"grammar": "x"}, {"json_object": True}],
    ids=lambda given: next(iter(given)),
)
def test_they_are_values(given):
    """They hash, pickle and survive JSON, for caches and for other processes, and cannot be changed."""
    params = StructuredOutputsParams(**given, disable_any_whitespace=False)
    fields = dataclasses.asdict(params)
    others = [
        StructuredOutputsParams(**given, disable_any_whitespace=False),
        pickle.loads(pickle.dumps(params)),
        StructuredOutputsParams(**json.loads(json.dumps(fields))),
        dataclasses.replace(params),
    ]
    assert all(other == params and hash(other) == hash(params) for other in others)
    assert params != dataclasses.replace(params, disable_any_whitespace=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.json_object = True


# Choices

CHOICES = ["yes", "no", "maybe", "yonder", "nothing", "null", "noth ing", " space", "ü", "🙂", '"}', "x" * 50]


def choices_for(kind):
    """Some begin others: "no" begins "nothing", and "nothing" begins "nothing at all"."""
    params = StructuredOutputsParams(choice=[*CHOICES, "nothing at all"])
    spelled = {
        tuple(tokenizer_of(kind)(choice, add_special_tokens=False)["input_ids"]): choice for choice in params.choice
    }
    return params, spelled


@pytest.mark.parametrize("kind", ["bundled", "merged"])
def test_a_mask_of_choices_holds_exactly_what_continues_one(kind):
    """The test follows every choice, and compares with the choices' token ids."""
    params, spelled = choices_for(kind)
    for ids, choice in spelled.items():
        constraint = outputs_of(kind).constraint(params)
        for place, token_id in enumerate(ids):
            begun = {other for other in spelled if other[:place] == ids[:place]}
            ends = eos_of(kind)[:2] if ids[:place] in spelled else []
            assert allowed_by(constraint) == sorted({*ends, *(each[place] for each in begun if len(each) > place)})
            goes_on = any(other[: place + 1] == ids[: place + 1] and len(other) > place + 1 for other in begun)
            assert constraint.advance(token_id) is not goes_on, choice
        assert set(eos_of(kind)[:2]) <= set(allowed_by(constraint)) and constraint.advance(eos_of(kind)[1])
        assert allowed_by(constraint) == eos_of(kind)[:2] and constraint.advance(eos_of(kind)[0])


@pytest.mark.parametrize("kind", ["bundled", "merged", "fallback"])
def test_random_walks_spell_every_choice_and_nothing_else(kind, count):
    params, spelled = choices_for(kind)
    rng = random.Random(0)
    texts = {walk(kind, params, rng, closes=0) for _ in range(count(800, 2000) if kind == "fallback" else 300)}
    assert texts == set(params.choice)
    if kind == "merged":
        assert any(len(ids) < len(choice.encode()) for ids, choice in spelled.items())


def test_many_choices_take_every_bit_of_a_word():
    """Bit 31 is the sign of a word."""
    letters = [chr(number) for number in range(33, 127)]
    constraint = outputs_of("bundled").constraint(StructuredOutputsParams(choice=letters))
    assert allowed_by(constraint) == list(range(33, 127))


def test_constraints_of_one_request_do_not_share_their_place():
    for params in (StructuredOutputsParams(choice=["ab", "cd"]), StructuredOutputsParams(regex="ab|cd")):
        first, second = (outputs_of("bundled").constraint(params) for _ in range(2))
        assert not first.advance(ord("a"))
        assert allowed_by(first) == [ord("b")] and allowed_by(second) == [ord("a"), ord("c")]
        assert first.advance(ord("b")) and not second.advance(ord("c"))


def test_a_token_that_is_not_allowed_is_an_error():
    constraint = outputs_of("bundled").constraint(StructuredOutputsParams(choice=["ab"]))
    for token_id in (ord("b"), 258):
        with pytest.raises(ValueError, match=f"token {token_id} continues none"):
            constraint.advance(token_id)


def test_a_leading_space_may_be_the_tokenizers():
    outputs = outputs_of("metaspace")
    params = StructuredOutputsParams(choice=["yes", " no"])
    assert decode(tokenizer_of("metaspace"), tokenizer_of("metaspace")(" no")["input_ids"]) == "no"
    constraint = outputs.constraint(params)
    for token_id in tokenizer_of("metaspace")("yes", add_special_tokens=False)["input_ids"]:
        is_complete = constraint.advance(token_id)
    assert is_complete


@pytest.mark.parametrize(
    ("kind", "choice", "says"),
    [
        ("lower", ["Yes"], "cannot spell choice 'Yes': its tokens say 'yes'"),
        ("merged", ["a", "<end>"], "cannot spell choice '<end>': its tokens say ''"),
        ("metaspace", ["no", " no"], "choices ' no' and 'no' have the same tokens; leave one out"),
        ("metaspace", ["yes", "漢"], "cannot spell choice '漢'"),
    ],
)
def test_a_choice_that_the_tokenizer_cannot_spell_is_named(kind, choice, says):
    with pytest.raises(ValueError, match=says):
        outputs_of(kind).constraint(StructuredOutputsParams(choice=choice))


def test_a_choice_beyond_the_models_vocabulary_is_named():
    outputs = StructuredOutputs(tokenizer_of("bundled"), 100, [])
    outputs.constraint(StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ValueError, match="choice 'z' has token 122, but the model has only 100 token ids"):
        outputs.constraint(StructuredOutputsParams(choice=["z"]))


def test_a_choice_that_begins_another_needs_an_end_of_sequence_token():
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [400])  # which the tokenizer lacks
    outputs.constraint(StructuredOutputsParams(choice=["a", "bc"]))
    with pytest.raises(ValueError, match="'bc' begins 'bcd', and the model has no end-of-sequence token"):
        outputs.constraint(StructuredOutputsParams(choice=["bcd", "a", "bc"]))


def test_choices_need_neither_llguidance_nor_an_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [258])
    masks = new_mask(1)
    fill_masks([outputs.constraint(StructuredOutputsParams(choice=["ab"]))], masks)
    assert ids_in(masks[0]) == [ord("a")]
    with pytest.raises(ValueError, match=r"pip install llguidance"):
        outputs.constraint(StructuredOutputsParams(regex="ab"))


def test_without_a_tokenizer_there_are_none():
    for given in ({"choice": ["a"]}, {"regex": "a"}):
        with pytest.raises(ValueError, match="no tokenizer"):
            StructuredOutputs(None, VOCAB_SIZE, [1]).constraint(StructuredOutputsParams(**given))


# Masks of llguidance


@pytest.fixture
def llguidance():
    return pytest.importorskip("llguidance")


def test_a_mask_of_a_regex_holds_exactly_what_continues_a_match(llguidance):
    """The test compares with all matches, of which there are few."""
    matches = [a + b + c for a, b, c in itertools.product(("ab", "ac", "ü"), ("", "d"), map(str, range(10, 15)))]
    texts = [match.encode() for match in matches] + [b"ab1"]
    params = StructuredOutputsParams(regex="(ab|ac|ü)d?1[0-4]|ab1")
    for text in texts:
        constraint, is_complete = outputs_of("bundled").constraint(params), False
        for place in range(len(text) + 1):
            begun = text[:place]
            expected = {other[place] for other in texts if other.startswith(begun) and len(other) > place}
            assert is_complete is not bool(expected), begun
            assert allowed_by(constraint) == sorted(expected | ({257, 258} if begun in texts else set())), begun
            is_complete = place < len(text) and constraint.advance(text[place])


@pytest.mark.parametrize("eos", [257, 258])
def test_where_a_completion_could_go_on_each_end_of_sequence_id_ends_it(llguidance, eos):
    constraint = outputs_of("bundled").constraint(StructuredOutputsParams(regex="a+"))
    assert allowed_by(constraint) == [ord("a")]
    assert not constraint.advance(ord("a")) and not constraint.advance(ord("a"))
    assert allowed_by(constraint) == [ord("a"), 257, 258]
    assert constraint.advance(eos)


REGEXES = [
    "[a-z]{2,5}", "(yes|no)( please)?", "[0-9]{3}-[0-9]{4}", r"-?[0-9]+(\.[0-9]{1,2})?", "a|b|", "(?i)hello",
    "[^a-zA-Z0-9]{1,3}", "x*y?z{2}", r"[a-z.]{1,5}@[a-z]{1,5}\.(com|org)", "a/b", "«é{1,2}»", "^anchored$", r"\n\t?\{",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bundled", "merged", "converted", "fallback"])
@pytest.mark.parametrize("regex", REGEXES)
def test_random_walks_match_the_regex(llguidance, kind, regex):
    rng = random.Random(0)
    texts = [walk(kind, StructuredOutputsParams(regex=regex), rng) for _ in range(5)]
    assert None not in texts
    for text in texts:
        assert re.fullmatch(regex, text), text


GRAMMARS = {
    "lark": ('start: "a" b+ "c"\nb: /[0-9]/ | "(" b ")"', r"a([0-9]|\(+[0-9]\)+)+c"),
    "gbnf": ('root ::= item ("," item)*\nitem ::= [a-z] [a-z] | "-"', r"([a-z]{2}|-)(,([a-z]{2}|-))*"),
}


@pytest.mark.parametrize("kind", ["bundled", "merged"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_random_walks_follow_the_grammar(llguidance, kind, name):
    grammar, pattern = GRAMMARS[name]
    rng = random.Random(0)
    texts = [walk(kind, StructuredOutputsParams(grammar=grammar), rng) for _ in range(20)]
    whole = [text for text in texts if text is not None]
    assert len(whole) >= 15
    for text in whole:
        assert re.fullmatch(pattern, text) and text.count("(") == text.count(")"), text


def object_of(**properties):
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


# Each feature of a schema once by itself; the generated schemas mix them.
SCHEMAS = [
    object_of(a={"type": "integer"}, b={"type": "string", "maxLength": 5}),
    object_of(a=object_of(b=object_of(c={"type": "null"}))),
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"b": 1, "a": "x"}},
    {"type": "integer", "minimum": -15, "maximum": 7},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string"},
    {"type": ["integer", "null", "boolean"]},
    {"anyOf": [{"type": "integer"}, object_of(a={"type": "boolean"})]},
    {"$ref": "#/$defs/a", "$defs": {"a": object_of(x={"$ref": "#/$defs/b"}), "b": {"enum": [1, 2]}}},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "string", "format": "date"},
    Person.model_json_schema(),
]


def check_walks(kind, schemas, num_walks):
    """Most walks have an end, and their texts are valid JSON in its shortest form. Returns how many had one."""
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(0)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    num_whole = 0
    for schema in schemas:
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for _ in range(num_walks):
            text = walk(kind, StructuredOutputsParams(json=schema), rng)
            if text is None:
                continue
            num_whole += 1
            validator.validate(json.loads(text))
            outside = re.sub(r'"([^"\\]|\\.)*"', '""', text)
            assert not re.search(r"\s", outside), text
    assert num_whole >= 0.8 * num_walks * len(schemas)


@pytest.mark.parametrize("kind", ["bundled", "merged", "fallback"])
def test_random_walks_are_valid_against_their_schema(llguidance, kind):
    check_walks(kind, SCHEMAS, num_walks=4)


@pytest.mark.parametrize("kind", ["bundled", "merged"])
def test_random_walks_are_valid_against_generated_schemas(llguidance, kind):
    check_walks(kind, make_schemas(60), num_walks=2)


def test_the_generated_schemas_all_compile(llguidance):
    schemas = make_schemas(200)
    assert len({json.dumps(schema) for schema in schemas}) == 200 and schemas[:60] == make_schemas(60)
    for schema in schemas:
        outputs_of("merged").constraint(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("kind", ["bundled", "merged"])
def test_any_object_is_an_object(llguidance, kind):
    rng = random.Random(0)
    texts = [walk(kind, StructuredOutputsParams(json_object=True), rng, closes=0.8) for _ in range(20)]
    assert sum(text is not None for text in texts) >= 15
    assert all(isinstance(json.loads(text), dict) for text in texts if text is not None)


def accepts(constraint, token_id):
    is_allowed = token_id in allowed_by(constraint)
    if is_allowed:
        constraint.advance(token_id)
    return is_allowed


def test_integers_up_to_the_limit_are_exact(llguidance):
    """Walks of one digit at a time: the neighbours of a limit are told apart."""
    limit = 2**53 - 1
    for schema, allowed in (
        ({"const": limit}, [limit]),
        ({"enum": [limit, -limit]}, [limit, -limit]),
        ({"type": "integer", "minimum": limit - 2, "maximum": limit}, [limit - 2, limit - 1, limit]),
        ({"type": "integer", "minimum": -limit, "exclusiveMaximum": 2 - limit}, [-limit, 1 - limit]),
    ):
        for number in (sign * (limit + delta) for sign in (1, -1) for delta in (-3, -2, -1, 0, 1, 2)):
            constraint = outputs_of("bundled").constraint(StructuredOutputsParams(json=schema))
            follows = all(accepts(constraint, each) for each in tokenizer_of("bundled")(str(number))["input_ids"])
            assert (follows and 257 in allowed_by(constraint)) == (number in allowed), (schema, number)


def test_properties_come_in_the_schemas_order(llguidance):
    schema = object_of(z={"const": 1}, a={"const": 2})
    assert walk("bundled", StructuredOutputsParams(json=schema), random.Random(0)) == '{"z":1,"a":2}'


def follows(constraint, text):
    """Whether a text, token by token of the bundled tokenizer, is a whole completion."""
    try:
        return [constraint.advance(byte) for byte in text.encode()][-1]
    except ValueError:
        return False


@pytest.mark.parametrize("pattern", [" ?", r"[ \n]{0,2}", r"\s*"])
def test_whitespace_follows_its_pattern(llguidance, pattern):
    params = StructuredOutputsParams(json=object_of(z={"const": 1}, y={"const": [2]}), whitespace_pattern=pattern)
    for space in ("", " ", "  ", "\n", "\t"):
        text = f'{{{space}"z":{space}1,{space}"y":{space}[{space}2]{space}}}'
        is_allowed = re.fullmatch(pattern, space) is not None
        assert follows(outputs_of("bundled").constraint(params), text) is is_allowed, repr(space)


@pytest.mark.parametrize("pattern", [r"\s", r"[\s]{1,2}", r"(?:\n|\s)"])
def test_whitespace_is_only_that_of_json(llguidance, pattern):
    r"""Rust's \s has vertical tabs and non-breaking spaces too, with which no parser reads JSON."""
    params = StructuredOutputsParams(json={"const": [2]}, whitespace_pattern=pattern)
    for space, is_allowed in ((" ", True), ("\r", True), ("\x0b", False), ("\u00a0", False)):
        assert follows(outputs_of("bundled").constraint(params), f"[{space}2{space}]") is is_allowed, repr(space)


def test_objects_are_closed_on_demand(llguidance):
    """A property may be called as a keyword of schemas."""
    schema = {
        "properties": {"properties": {"type": "object", "properties": {"a": {"const": 1}}}, "b": {"type": "object"}},
        "required": ["properties"],
        "default": {"properties": {}},
        "type": "object",
    }
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    closed = json.loads(params.json)
    assert closed.pop("additionalProperties") is closed["properties"]["properties"].pop("additionalProperties") is False
    assert closed == schema and "additionalProperties" not in schema
    for text, is_open in (
        ('{"properties":{"a":1}}', False),
        ('{"properties":{},"b":{"c":1}}', False),
        ('{"properties":{"d":1}}', True),
        ('{"properties":{},"additionalProperties":1}', True),
    ):
        for each in (params, StructuredOutputsParams(json=schema)):
            constraint = outputs_of("bundled").constraint(each)
            assert follows(constraint, text) is (each is not params or not is_open), text
    kept = {"properties": {}, "additionalProperties": True}
    assert json.loads(StructuredOutputsParams(json=kept, disable_additional_properties=True).json) == kept


def masks_of_walk(outputs, params, token_ids):
    """The ids that may come at each place of a walk."""
    constraint = outputs.constraint(params)
    masks = [allowed_by(constraint)]
    for token_id in token_ids:
        constraint.advance(token_id)
        masks.append(allowed_by(constraint))
    return masks


UNKNOWN_FORMATS = ["int32", "phone", "uri-reference", "password", "no such format", ""]
ANNOTATIONS = {
    "title": "T", "description": "D", "default": 5, "deprecated": True, "readOnly": True, "writeOnly": False,
    "examples": [1], "example": 1, "$comment": "C", "contentMediaType": "text/plain", "contentEncoding": "base64",
    "contentSchema": {}, "nullable": False, "discriminator": {"propertyName": "x"}, "x-order": 1, "strict": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["bundled", "merged", "fallback"])
def test_unknown_formats_and_other_annotations_change_nothing(llguidance, kind):
    """JSON Schema calls them annotations. Such a schema once was an error."""
    string, outputs = {"type": "string", "maxLength": 3}, outputs_of(kind)
    schema = object_of(a=string, b={"type": ["integer", "string"], "pattern": "^x$"})
    token_ids = [texts_of(kind).index(character) for character in '{"a":"']
    expected = masks_of_walk(outputs, StructuredOutputsParams(json=schema), token_ids)
    for more in [*({"format": each} for each in UNKNOWN_FORMATS), ANNOTATIONS]:
        annotated = object_of(a={**string, **more}, b={**schema["properties"]["b"], **more})
        assert masks_of_walk(outputs, StructuredOutputsParams(json=annotated), token_ids) == expected, more


@pytest.mark.parametrize(
    ("format", "text"), [("date", "2024-02-30"), ("uuid", "0"), ("ipv4", "256.1.1.1"), ("email", "a b"), ("time", "x")]
)
def test_known_formats_are_obeyed(llguidance, format, text):
    params = StructuredOutputsParams(json={"type": "string", "format": format})
    assert not follows(outputs_of("bundled").constraint(params), f'"{text}"')


def test_whitespace_is_allowed_on_demand(llguidance):
    schema = object_of(z={"const": 1})
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=False)
    constraint = outputs_of("bundled").constraint(params)
    for character in '{ \n\t"z" : 1  ':
        assert not constraint.advance(ord(character))
    assert constraint.advance(ord("}"))
    constraint = outputs_of("bundled").constraint(StructuredOutputsParams(json=schema))
    constraint.advance(ord("{"))
    assert allowed_by(constraint) == [ord('"')]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"regex": "b?" * 500 + "(?=a)"},
            r"regex cannot be compiled: look-around, .* is not supported: \?(b\?)+\(\?=; .* & ~/\.\*no\.\*/$",
        ),
        ({"regex": "(" * 500 + "a" + ")" * 500}, "regex cannot be compiled: exceed"),
        ({"regex": r"[^\s\S]"}, "regex cannot be compiled: no token can come next"),
        ({"json": {"not": {}}}, r'json cannot be compiled: Unimplemented keys: \["not"\]; leave them out'),
        (
            {"json": {"format": "x", "not": {}}},
            r'json cannot be compiled: Unimplemented keys: \["not"\]; leave them out',
        ),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 2}]}}, "oneOf not fully supported; .* or write anyOf$"),
        ({"json": {"format": 5}}, "json cannot be compiled: Expected string for 'format'"),
        ({"json": {"type": "foo"}}, "json cannot be compiled: Invalid type: foo"),
        ({"json": {"$ref": "#/$defs/a"}}, "json cannot be compiled: .*does not exist"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable schema"),
        ({"json": functools.reduce(lambda part, _: {"items": part}, range(400), {})}, "recursion limit"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no token can come next"),
        ({"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000}, "too deeply nested"),
        ({"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000}, "recursion"),
        ({"grammar": "start: foo"}, 'grammar cannot be compiled: .*unknown name: "foo"'),
        ({"grammar": "nonsense"}, "grammar cannot be compiled: .*GBNF"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_llguidance_cannot_compile_is_an_error_with_its_reason(llguidance, given, says):
    with pytest.raises(ValueError, match=says) as raised:
        outputs_of("bundled").constraint(StructuredOutputsParams(**given))
    assert "\n" not in str(raised.value) and "<" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("regex", "construct", "instead"),
    [
        ("a(?=b)", r"look-around.*a\(\?=", "write out what may come, or exclude texts in a grammar"),
        ("a(?!b)c", r"look-around.*a\(\?!", "write out what may come, or exclude texts in a grammar"),
        ("(?<=a)b", r"look-around.*\(\?<=", "write out what may come, or exclude texts in a grammar"),
        ("(?<!a)b", r"look-around.*\(\?<!", "write out what may come, or exclude texts in a grammar"),
        (r"(a)\1", r"backreferences.*\(a\)\\1", "write out the texts that may come twice"),
        (r"(?P<x>a)(?P=x)", r"unrecognized flag: \(\?P<x>a\)\(\?P;", "the syntax is that of Rust's regex"),
        ("(?>a)b", r"unrecognized flag: \(\?>", "the syntax is that of Rust's regex"),
        (r"a\Z", r"unrecognized escape sequence: a\\Z", "the syntax is that of Rust's regex"),
        (r"\bfoo\b", r"word boundaries \(\\b, \\B\)", "write out the characters beside the word"),
        (r"foo\Bx", r"word boundaries \(\\b, \\B\)", "write out the characters beside the word"),
        ("a$b", r"\^ must be first and \$ last", ""),
    ],
)
def test_what_llguidance_cannot_take_of_a_regex_is_named_with_what_to_do_instead(llguidance, regex, construct, instead):
    says = f"cannot be compiled: .*{construct}.*{instead}"
    for given in (
        {"regex": regex},
        {"json": object_of(a={"type": "string", "pattern": regex})},
        {"json": {"type": "object", "patternProperties": {regex: {}}}},
        {"grammar": f"start: A\nA: /{regex}/"},
    ):
        with pytest.raises(ValueError, match=says) as raised:
            outputs_of("bundled").constraint(StructuredOutputsParams(**given))
        assert not instead or str(raised.value).count(instead) == 1


def test_the_advice_against_look_ahead_works(llguidance):
    params = StructuredOutputsParams(grammar="start: TEXT\nTEXT: /[a-z]+/ & ~/.*no.*/")
    texts = {walk("bundled", params, random.Random(seed), closes=0.2) for seed in range(30)}
    assert len(texts) > 20 and not any("no" in text for text in texts - {None})
    constraint = outputs_of("bundled").constraint(params)
    for letter in b"an":
        constraint.advance(letter)
    assert ord("o") not in allowed_by(constraint) and ord("p") in allowed_by(constraint)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_completions_of_one_grammar_do_not_use_up_each_others_limits(llguidance, monkeypatch, is_parallel):
    """Copies of a matcher share a lexer. Once it was full, each later completion of its grammar was an error."""
    matcher = llguidance.LLMatcher

    class Limited:
        grammar_from_regex = matcher.grammar_from_regex

        def __new__(cls, *args, **kwargs):
            return matcher(*args, **kwargs, limits=llguidance.LLParserLimits(max_lexer_states=600))

    monkeypatch.setattr(llguidance, "LLMatcher", Limited)
    monkeypatch.setattr(nanovllm.constraints, "_MIN_IN_PARALLEL", 1 if is_parallel else 100)
    monkeypatch.setattr(nanovllm.constraints, "_num_threads", lambda: 1)
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [258])
    params = StructuredOutputsParams(regex="x(a|b)*a(a|b){200}")  # each text of a and b leads to a state of its own
    rng = random.Random(0)
    for _ in range(8):
        constraint, masks = outputs.constraint(params), new_mask(1)
        constraint.advance(ord("x"))
        for _ in range(150):
            fill_masks([constraint], masks)
            assert ids_in(masks[0]) == [ord("a"), ord("b")]
            assert not constraint.advance(rng.choice(b"ab"))
    with pytest.raises(ValueError, match="too many states"):  # its own limit
        for _ in range(1000):
            fill_masks([constraint], masks)
            constraint.advance(rng.choice(b"ab"))


def test_a_grammar_that_fails_on_its_way_says_why(llguidance):
    """Such a grammar compiles, and has a first token."""
    constraint = outputs_of("bundled").constraint(StructuredOutputsParams(grammar='start: "a" start'))
    with pytest.raises(ValueError, match="Too many items"):
        constraint.advance(ord("a"))
    with pytest.raises(ValueError, match="Too many items"):
        constraint.fill(new_mask())


def test_a_forbidden_token_is_an_error_of_its_constraint_only(llguidance):
    params = StructuredOutputsParams(regex="a+b")
    failed, sound = (outputs_of("bundled").constraint(params) for _ in range(2))
    for token_id in (ord("c"), 258, 499, 10**6):
        with pytest.raises(ValueError, match=r"."):
            outputs_of("bundled").constraint(params).advance(token_id)
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        failed.advance(ord("c"))
    assert not sound.advance(ord("a")) and allowed_by(sound) == [ord("a"), ord("b")]


@pytest.mark.parametrize("num_each", [1, 20])  # one by one, and by llguidance's threads
def test_many_masks_at_once_are_those_of_each(llguidance, num_each):
    outputs = outputs_of("merged")
    params = [StructuredOutputsParams(**given) for given in ({"choice": CHOICES[3:5]}, {"regex": "[a-f]+"})]
    params += [StructuredOutputsParams(json=schema) for schema in make_schemas(3)]
    params *= num_each
    together, alone = ([outputs.constraint(each) for each in params] for _ in range(2))
    rng = random.Random(0)
    for _ in range(10):
        masks = new_mask(len(params))
        fill_masks(together, masks)
        going = []
        for row, (mask, one, other) in enumerate(zip(masks, together, alone, strict=True)):
            assert ids_in(mask) == allowed_by(other), params[row]
            token_id = rng.choice(ids_in(mask))
            is_complete = one.advance(token_id)
            assert other.advance(token_id) is is_complete
            if not is_complete:
                going.append((params[row], one, other))
        params, together, alone = map(list, zip(*going, strict=True)) if going else ([], [], [])


@pytest.mark.parametrize("num_each", [1, 20])
def test_a_failed_constraint_is_named_and_the_others_are_filled(llguidance, num_each):
    outputs = outputs_of("bundled")
    constraints = [
        outputs.constraint(StructuredOutputsParams(**given))
        for given in ({"regex": "ab"}, {"choice": ["xy"]}, {"regex": "cd"})
        for _ in range(num_each)
    ]
    with pytest.raises(ValueError):
        constraints[-1].advance(ord("d"))
    masks = new_mask(len(constraints))
    with pytest.raises(FillError, match="doesn't satisfy") as raised:
        fill_masks(constraints, masks)
    assert list(raised.value.reasons) == [len(constraints) - 1]
    expected = [[ord(letter)] for letter in "axc" for _ in range(num_each)]
    assert [ids_in(mask) for mask in masks] == [*expected[:-1], [257, 258]]


@pytest.mark.parametrize("kind", ["bundled", "merged", "fallback"])
def test_tokens_beyond_the_models_vocabulary_are_never_proposed(llguidance, kind):
    """Gemma 3's tokenizer has one token more than its model, and fine-tunes add tokens for padding."""
    smaller, larger = tokenizer_of(kind), tokenizer_of.__wrapped__(kind)
    vocab_size, rng = len(smaller), random.Random(0)
    larger.add_special_tokens({"pad_token": "<new>"})
    larger.add_tokens(["nameless", "1234567"])
    assert len(larger) == vocab_size + 3
    for given in (
        {"regex": "(nameless|1234567)+"},
        {"json": SCHEMAS[0]},
        {"json_object": True},
        {"choice": ["nam", "1"]},
    ):
        params = StructuredOutputsParams(**given)
        one, other = (
            StructuredOutputs(each, vocab_size, eos_of(kind)).constraint(params) for each in (smaller, larger)
        )
        for _ in range(30):
            masks = np.full((2, -(-vocab_size // 32)), -1, np.int32)
            fill_masks([one], masks[:1])
            fill_masks([other], masks[1:])
            assert (masks[0] == masks[1]).all() and ids_in(masks[0])[-1] < vocab_size, given
            token_id = rng.choice(ids_in(masks[0]))
            is_complete = one.advance(token_id)
            assert other.advance(token_id) is is_complete
            if is_complete:
                break
    with pytest.raises(ValueError, match=r"has token .*, but the model has only"):
        StructuredOutputs(larger, vocab_size, [1]).constraint(StructuredOutputsParams(choice=["nameless"]))


@pytest.mark.parametrize(("kind", "vocab_size"), [("bundled", 200), ("merged", 300)])
def test_a_model_may_lack_ordinary_tokens_of_its_tokenizer(llguidance, kind, vocab_size):
    """The model's vocabulary was cut. What is left can still spell letters."""
    outputs = StructuredOutputs(tokenizer_of(kind), vocab_size, [1])
    constraint = outputs.constraint(StructuredOutputsParams(regex="[a-z]{3}"))
    mask, text = np.zeros(-(-vocab_size // 32), np.int32), ""
    while True:
        constraint.fill(mask)
        assert ids_in(mask)[-1] < vocab_size
        token_id = random.Random(len(text)).choice(ids_in(mask))
        text += texts_of(kind)[token_id]
        if constraint.advance(token_id):
            break
    assert re.fullmatch("[a-z]{3}", text)


def test_a_unigram_tokenizer_with_an_added_token_is_read(llguidance):
    scored = [("<unk>", 0.0), ("<end>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in 'abc{}":[],1é')]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    constraint = StructuredOutputs(tokenizer, len(scored), [1]).constraint(StructuredOutputsParams(regex="ab"))
    mask = np.zeros(1, np.int32)
    constraint.fill(mask)
    assert ids_in(mask) == [3]


def test_equal_params_are_compiled_once(llguidance, monkeypatch):
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [258])
    outputs.constraint(StructuredOutputsParams(json={"type": "integer"}))
    monkeypatch.setattr(outputs, "_matcher", None)
    outputs.constraint(StructuredOutputsParams(json='{ "type": "integer" }'))


def misread_tokenizer():
    """Its decoder strips a brace, and llguidance does not know that."""
    tokenizer = tokenizer_of.__wrapped__("merged")
    stripped = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("{", 1, 0)])
    tokenizer.backend_tokenizer.decoder = stripped
    return tokenizer


class SlowTokenizer:
    def get_vocab(self):
        return {"a": 0, "<end>": 1}


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "eos", "says"),
    [
        (SlowTokenizer(), 500, [1], "cannot read the model's tokenizer: it is not a fast tokenizer"),
        (misread_tokenizer(), 500, [1], "it reads the tokens of"),
        (tokenizer_of("bundled"), 500, [], "no end-of-sequence token"),
        (tokenizer_of("bundled"), 500, [400], "no end-of-sequence token"),
    ],
    ids=["slow", "misread", "endless", "end unknown"],
)
def test_a_tokenizer_that_llguidance_cannot_use_is_an_error(llguidance, tokenizer, vocab_size, eos, says):
    with pytest.raises(ValueError, match=says):
        StructuredOutputs(tokenizer, vocab_size, eos).constraint(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(("num_threads", "num_groups"), [(1, 1), (3, 4), (12, 16)])
def test_many_constraints_are_copies_of_as_many_matchers_as_threads_can_fill(
    llguidance, monkeypatch, num_threads, num_groups
):
    """Copies of one matcher share a lock: twelve threads were once slower than one."""
    monkeypatch.setattr(nanovllm.constraints, "_num_threads", lambda: num_threads)
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [258])
    params = StructuredOutputsParams(json={"type": "integer"})
    constraints = [outputs.constraint(params) for _ in range(256)]
    sizes = Counter(constraint.group for constraint in constraints)
    assert sorted(sizes) == list(range(num_groups)) and set(sizes.values()) == {256 // num_groups}
    masks = new_mask(256)
    fill_masks(constraints, masks)
    assert (masks == masks[0]).all()
    del constraints[8:]
    assert {outputs.constraint(params).group for _ in range(20)} <= set(range(num_groups))
    few = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [258])
    assert {few.constraint(params).group for _ in range(300)} == {0}  # no matcher is kept


class Failing:
    """A constraint of three tokens that fails at the second."""

    def __init__(self, at: str):
        self.at, self.num_tokens = at, 0

    def advance(self, token_id: int) -> bool:
        self.num_tokens += 1
        if self.at == "advance" and self.num_tokens == 2:
            raise ValueError("too many items")
        return self.num_tokens == 3

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 1
        if self.at == "fill" and self.num_tokens == 1:
            raise ValueError("too many items")


@pytest.mark.parametrize("at", ["fill", "advance"])
def test_a_constraint_that_cannot_go_on_ends_its_completion_with_the_reason(at):
    """The other rows of its step go on."""
    guides = [Guide(Failing("")), Guide(Failing(at))]
    ends = []
    for _ in range(2):
        Guide.fill_masks(guides, np.empty((2, 1), np.int32))
        ends.append([guide(5) for guide in guides])
    assert ends == [[False, False], [False, True]]
    assert guides[0].error is None and guides[0](5)
    assert str(guides[1].error) == "the structured output cannot go on: too many items"


def test_stop_strings_end_a_guided_completion_too():
    seen = []
    guide = Guide(Failing(""), lambda token_id: seen.append(token_id) or token_id == 7)
    assert [guide(5), guide(7)] == [False, True] and seen == [5, 7] and guide.error is None


class Free:
    """A constraint that allows some ids, and ends with 7."""

    def __init__(self, ids):
        self.ids = ids

    def advance(self, token_id: int) -> bool:
        return token_id == 7

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = pack_allowed(self.ids, 64)


def test_ends_are_banned_until_min_tokens_unless_nothing_else_may_come():
    guides = [Guide(Free([5, 7, 40]), min_tokens=2, end_token_ids=[7, 40]), Guide(Free([7, 40]), None, 2, [7, 40])]
    guides += [Guide(Free([5, 7, 40]))]
    masks = np.zeros((3, 2), np.int32)
    for _ in range(2):
        Guide.fill_masks(guides, masks)
        assert [ids_in(mask) for mask in masks] == [[5], [7, 40], [5, 7, 40]]
        assert [guide(5) for guide in guides] == [False] * 3
    Guide.fill_masks(guides, masks)
    assert [ids_in(mask) for mask in masks] == [[5, 7, 40], [7, 40], [5, 7, 40]]
    assert all(guide(7) for guide in guides)


def test_a_guide_bans_stop_tokens_of_the_model_and_of_the_request():
    outputs = StructuredOutputs(tokenizer_of("bundled"), VOCAB_SIZE, [257, 258])
    params = SamplingParams(
        min_tokens=1, stop_token_ids=[ord("b"), -1, 10**6], structured_outputs={"choice": ["a", "b"]}
    )
    masks = new_mask(1)
    Guide.fill_masks([outputs.guide(params)], masks)
    assert ids_in(masks[0]) == [ord("a")]


# pydantic's classes


def test_a_pydantic_class_its_schema_and_its_string_are_the_same(llguidance):
    pydantic = pytest.importorskip("pydantic")
    jsonschema = pytest.importorskip("jsonschema")
    fields = {
        "kind": (typing.Literal["cat"], ...), "born": (datetime.date, ...), "size": (int | None, ...),
        "path": (pathlib.Path, ...), "tags": (list[typing.Literal["a", "b"]], pydantic.Field(max_length=2)),
    }  # fmt: skip
    cat = pydantic.create_model("Cat", **fields)
    dog = pydantic.create_model("Dog", kind=(typing.Literal["dog"], ...))
    pets = pydantic.create_model("Pets", pet=(cat | dog, pydantic.Field(discriminator="kind")))
    schema = pets.model_json_schema()
    params = [StructuredOutputsParams(json=given) for given in (pets, schema, json.dumps(schema))]
    assert params[0] == params[1] == params[2]
    rng, kinds = random.Random(0), set()
    for _ in range(20):
        closed = dataclasses.replace(params[0], disable_additional_properties=True)
        if (text := walk("merged", closed, rng)) is not None:
            jsonschema.validate(json.loads(text), schema)
            kinds.add(pets.model_validate_json(text).pet.kind)
    assert kinds == {"cat", "dog"}


# Messages

OPTIONS = {
    *Config.__dataclass_fields__, *SamplingParams.__dataclass_fields__, *StructuredOutputsParams.__slots__,
    *inspect.signature(nanovllm.LLM.chat).parameters,
}  # fmt: skip
MODULES = [
    nanovllm.structured_outputs, nanovllm.sampling_checks, nanovllm.sampling_params, nanovllm.guides,
    nanovllm.constraints, nanovllm.accepted, nanovllm.checks,
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_message_names_only_options_that_exist(module):
    """Beside these, llguidance's advice to enable `coerce_one_of` once came through."""
    strings = [node.value for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Constant)]
    named = {name for each in strings if isinstance(each, str) for name in re.findall(r"\b([a-z][a-z_]+)=", each)}
    assert named <= OPTIONS
