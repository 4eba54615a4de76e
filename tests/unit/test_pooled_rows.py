"""PooledRows, and an LLM that only pools: parameters and the files of sentence-transformers reach the numbers."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.fake_runner import add_pooled, make_engine, run_to_end
from support.model_factory import read_tensors, save_demo_classifier, save_demo_model, save_embedder_files
from support.small_tokenizers import small_tokenizers
from tokenizers.processors import TemplateProcessing

from nanovllm import LLM, Config, PoolingParams
from nanovllm.engine.sequence import Pooling
from nanovllm.models.pooling_config import PoolingConfig
from nanovllm.pooled_rows import PooledRows, PoolingFacts, _softmax
from nanovllm.pooling_outputs import PooledOutput
from nanovllm.pooling_params import pooler_config
from nanovllm.runner import memory
from nanovllm.runner.step_sizes import StepRows, StepSizes, doubling_ladder
from nanovllm.text import Text

QUIET = {"use_tqdm": False}
OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 64}
GIB = 2**30


@pytest.fixture
def bos():
    tok = small_tokenizers()["byte-level BPE"]
    eos = tok.eos_token_id
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", pair="<eos> $A <eos> $B:1", special_tokens=[("<eos>", eos)]
    )
    return tok


def ids(rows, params, pair=("the cat", "a hat")):
    (found,) = rows.encode([(pair, params)])
    assert found.error is None, found.error
    return found


def test_special_tokens_of_pairs(bos):
    rows = PooledRows(Text(bos), PoolingFacts("score", ("x",), max_model_len=64))
    assert ids(rows, PoolingParams("score")).token_ids == bos("the cat", "a hat")["input_ids"]


@pytest.mark.parametrize("head", ["score", "lm"])
def test_a_recipe_has_no_special_tokens(bos, head):
    rows = PooledRows(Text(bos), PoolingFacts(head, ("x",), max_model_len=640))
    assert bos.eos_token_id not in ids(rows, PoolingParams("score", recipe="qwen3-reranker")).token_ids


@pytest.mark.parametrize(("head", "pooling"), [("score", None), ("lm", "last")])
def test_a_pair_is_cut(bos, head, pooling):
    rows = PooledRows(Text(bos), PoolingFacts(head, ("x",), max_model_len=64))
    found = ids(rows, PoolingParams("score", pooling=pooling, truncate_prompt_tokens=3), ("the cat " * 9, "hat " * 9))
    assert [len(each.token_ids) for each in (found, *found.others)] == [3] * (1 + (head == "lm"))


def test_limits_are_inclusive(tmp_path):
    with LLM(save_demo_model(tmp_path, 1), **OPTIONS) as llm:
        assert len(llm.embed("a", dimensions=160, **QUIET)[0].embedding) == 160
        for layer in (2, -3):
            with pytest.raises(ValueError, match="from -2 to 1"):
                llm.embed("a", hidden_states_layers=[layer], **QUIET)


def test_zero_states_stay_zero(tmp_path):
    model = save_demo_model(tmp_path, 1)
    with LLM(model, **OPTIONS) as llm:
        llm.update_weights({"model.norm.weight": 0 * read_tensors(model)["model.norm.weight"]})
        assert (llm.embed("a", **QUIET)[0].embedding == 0).all()


def test_softmax_of_large_numbers():
    with np.errstate(all="raise", under="ignore"):
        for first in (-1000, 1000):
            assert np.allclose(_softmax(np.float32([[first, first]])), 0.5)


def facts(**changes):
    return PoolingFacts(
        embedder=replace(
            PoolingConfig("mean", True, 3, {"query": "Q: ", "document": "", "d": "D: "}, "D: ", None), **changes
        ),
        max_model_len=64,
        hidden_size=160,
        num_layers=1,
    )


def test_length_of_the_files(bos):
    rows = PooledRows(Text(bos), facts())
    (found,) = rows.encode([("the cat sat on the mat", PoolingParams("embed", truncate_prompt_tokens=-1))])
    assert len(found.token_ids) == 3


@pytest.mark.parametrize("prompt", ["x", {"prompt": "x"}])
@pytest.mark.parametrize("task", [None, "embed", "token_embed"])
@pytest.mark.parametrize(("name", "prefix"), [(None, "D: "), ("query", "Q: "), ("document", "")])
def test_prompts_of_the_files(bos, prompt, task, name, prefix):
    rows = PooledRows(Text(bos), facts())
    (found,) = rows.encode([(prompt, PoolingParams(task, prompt_name=name))])
    assert found.error is None and found.text == prefix + "x"


def test_prompt_name_needs_text_and_a_known_name(bos):
    rows = PooledRows(Text(bos), facts())
    for prompt, name, words in (
        ([1], "query", "needs a prompt that is a string"),
        ("x", "queries", "is not in the checkpoint, which has 'query', 'document', 'd'"),
    ):
        (found,) = rows.encode([(prompt, PoolingParams(prompt_name=name))])
        assert words in str(found.error)


def test_each_row_that_the_model_cannot_serve_has_its_error(bos):
    rows, label = PooledRows(Text(bos), facts()), PoolingParams("label", labels=["a", "b"])
    rows.facts = rows.facts._replace(head="none")
    found = rows.encode([("x", label), ("y", label), ("z", PoolingParams("embed"))])
    assert ["LM head" in str(each.error) for each in found] == [True, True, False] and found[2].text == "D: z"


def test_a_dot_product_and_dimensions_of_the_files(tmp_path):
    model = save_embedder_files(save_demo_model(tmp_path, 1), similarity_fn_name="dot", truncate_dim=7)
    with LLM(model, **OPTIONS) as llm:
        whole = llm.embed(["a", "b"], dimensions=160, **QUIET)
        short = llm.embed(["a", "b"], **QUIET)
        assert [len(each.embedding) for each in short] == [7, 7]
        assert np.allclose(short[0].embedding, whole[0].embedding[:7], atol=1e-6)
        assert llm.embed("a", dimensions=9, **QUIET)[0].embedding.shape == (9,)
        (raw,) = llm.score("a", "b", normalize=False, **QUIET)
        a, b = (each.embedding for each in llm.embed(["a", "b"], normalize=False, **QUIET))
        assert raw.score == pytest.approx(float(a @ b), rel=1e-5) and abs(raw.score) > 1


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    with LLM(save_demo_classifier(tmp_path_factory.mktemp("scorer"), 1), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    directory = save_embedder_files(save_demo_model(tmp_path_factory.mktemp("embedder"), 1), prompts={"query": "Q: "})
    with LLM(directory, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("name", ["classify", "reward", "encode", "score", "embed", "embed_iter"])
def test_every_method_cuts_prompts(scorer, embedder, name):
    given = {"truncate_prompt_tokens": 3}
    calls = {
        "classify": lambda: scorer.classify("x" * 500, **given, **QUIET),
        "reward": lambda: scorer.reward("x" * 500, **given, **QUIET),
        "encode": lambda: embedder.encode("x" * 500, **given, **QUIET),
        "score": lambda: scorer.score("x" * 500, "y", **given, **QUIET),
        "embed": lambda: embedder.embed("x" * 500, **given, **QUIET),
        "embed_iter": lambda: list(embedder.embed_iter("x" * 500, **given)),
    }
    (output,) = calls[name]()
    assert output.error is None and output.num_prompt_tokens == 3


@pytest.mark.parametrize("name", ["classify", "reward"])
def test_every_method_raises_on_request(scorer, name):
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        getattr(scorer, name)(["a", ""], raise_on_error=True, **QUIET)


def test_the_prompt_of_a_name(embedder):
    (named,), (plain,), (it,) = (
        embedder.embed("x", prompt_name="query", **QUIET),
        embedder.embed("Q: x", **QUIET),
        embedder.embed_iter("x", prompt_name="query"),
    )
    assert named.prompt == it.prompt == "Q: x" and np.allclose(named.data, plain.data, atol=1e-6)


def test_encode_returns_layers(embedder):
    (output,) = embedder.encode("abc", hidden_states_layers=[0, -1], **QUIET)
    assert output.hidden_states.shape == (2, 3, 160)


def pooled_sizes():
    return StepSizes.of(64, 4096, 1024, 1024, 1e8, True, True, generates=False)


def rows(*lengths):
    zeros, n = np.zeros(len(lengths), np.int64), np.array(lengths, np.int64)
    return StepRows(np.zeros((len(lengths), 2), np.int64), zeros, n, n, zeros + 1, zeros, zeros)


def test_sizes_without_generation():
    assert doubling_ladder(32768) == [2048, 4096, 8192, 16384, 32768] and doubling_ladder(500) == [500]
    sizes = pooled_sizes()
    assert sizes.prompt_sizes == (1024, 2048, 4096) and not sizes.decode_sizes and sizes.are_captured
    assert not sizes.eager().are_captured
    tiles = [sizes.size_of(rows(*[length] * count), 0)[0].num_tiles for length, count in ((512, 2), (16, 64))]
    size, is_captured = sizes.size_of(rows(512, 512), 0)
    assert is_captured and size.max_num_decodes == 0 and tiles[0] < tiles[1]


def test_twice_as_many_sequences_without_generation():
    numbers = [
        memory.default_max_num_seqs(Config("m"), 8 * GIB, 32 * 2**10, 0, 800 * GIB, True, each)
        for each in (True, False)
    ]
    assert numbers == [1024, 2048]


def test_scores_of_an_embedder_are_refused_with_the_reason(bos):
    no = PooledRows(Text(bos), PoolingFacts(refusal="Dense is not supported"))
    with pytest.raises(ValueError, match="Dense is not supported; or give pooling="):
        no.check(PoolingParams("score"))
    original = PooledRows(Text(bos), PoolingFacts(asks_yes_or_no=True))
    assert original.request(PoolingParams("score", pooling="mean")) == Pooling("mean")
    assert not isinstance(original.request(PoolingParams("score")), Pooling)
    with pytest.raises(ValueError, match="cannot be cut"):
        original.check(PoolingParams("score", truncate_prompt_tokens=5))


def test_only_one_number_is_a_score():
    one, two = (PooledOutput("reward", np.arange(size, dtype=np.float32)) for size in (1, 2))
    assert (one.score, two.score, PooledOutput("embed", np.ones(1, np.float32)).score) == (0.0, None, None)


def test_hidden_size_of_tokens_states():
    assert PooledOutput("token_embed", np.zeros((3, 8), np.float32)).hidden_size == 8


def test_nulls_of_a_pooler_config():
    assert pooler_config(SimpleNamespace(pooling_type="MEAN", normalize=None, dimensions=None)) == {"pooling": "mean"}


def test_each_param_is_checked_at_once(embedder):
    with pytest.raises(ValueError, match="hidden_size=160"):
        embedder.embed(["a", "b"], [None, {"dimensions": 161}], **QUIET)


def test_the_engine_refuses_a_head_that_is_not_there():
    engine = make_engine(num_blocks=20)
    for kind, words in (
        (Pooling("last", (), True), "no classification head"),
        (Pooling("last", (99,)), "hidden_states_layers must be"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add_pooled([1], kind)
    assert engine.metrics()["num_rejected_requests"] == 2


def test_num_requests_of_a_score():
    assert (PoolingParams("score").n, PoolingParams("label", labels=("a", "b", "c")).n, PoolingParams().n) == (2, 3, 1)


def test_cached_tokens_of_all_prompts(tmp_path):
    with LLM(save_demo_model(tmp_path, 1), kvcache_block_size=4, **OPTIONS) as llm:
        found = [
            llm.score("a", text, pooling="last", **QUIET)[0]
            for text in ("The same beginning 1", "The same beginning 2")
        ]
    assert [each.num_cached_tokens for each in found] == [0, 16]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_states_of_16_bits_are_those_of_the_tokens(tmp_path, pooling):
    """A mean is summed in float32."""
    prompt = list(range(1, 60))
    with LLM(save_demo_model(tmp_path, 1), dtype="bfloat16", **OPTIONS) as llm:
        (found,) = llm.embed([prompt], pooling=pooling, normalize=False, **QUIET)
        (whole,) = llm.encode([prompt], **QUIET)
    expected = whole.data[-1] if pooling == "last" else whole.data.mean(0)
    assert np.allclose(found.embedding, expected, rtol=1e-4, atol=1e-4)


def test_the_cache_without_generation_holds_the_keys_of_four_steps():
    assert memory.num_useful_blocks(10, 64, 1, 16384, 1024, generates=True) == 10240
    assert memory.num_useful_blocks(10, 64, 1, 16384, 1024, generates=False) == 10 + 4 * 256 + 512
    assert memory.num_useful_blocks(10, 64, 3, 16384, 1024, generates=False) == 10 + 3 * (4 * 256 + 512)


def test_first_token_time_of_a_pooled_row():
    engine = make_engine(num_blocks=20)
    add_pooled(engine, [1, 2, 3], Pooling("last"))
    (seq,) = run_to_end(engine).values()
    assert seq.first_token_time is None
