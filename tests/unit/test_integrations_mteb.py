"""mteb on nanovllm gives the scores that it gives on sentence-transformers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.model_factory import save_demo_classifier, save_demo_model, save_embedder_files

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 256, "num_kvcache_blocks": 40}
PROMPTS = {"query": "Q: ", "document": "", "STS": "Compare: ", "default": "D: "}
QUERIES = [f"Which {kind} is {size}?" for kind in ("river", "bird", "metal") for size in ("large", "small")]
KINDS = ("river", "bird", "metal", "The Nile", "A wren")
DOCUMENTS = [
    f"{kind} number {number} is {size}, they say. " + "It is so. " * number
    for number, kind in enumerate(KINDS)
    for size in ("large", "tiny")
]
STS = SimpleNamespace(name="Pairs", type="STS")


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("mteb.models.abs_encoder")
    from nanovllm.integrations import mteb

    return mteb


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = save_demo_model(tmp_path_factory.mktemp("embedder"), 2)
    return save_embedder_files(directory, prompts=PROMPTS, default_prompt_name="default", similarity_fn_name="dot")


@pytest.fixture(scope="module")
def encoder(module, directory):
    encoder = module.NanovllmEncoder(str(directory), **OPTIONS)
    yield encoder
    encoder.llm.close()


def tasks() -> list:
    """A retrieval, a reranking and a similarity task of local data, made as mteb makes its own mock tasks."""
    from datasets import Dataset
    from mteb.mocks.mock_tasks import reranking, retrieval, sts

    def rows(texts: list[str]) -> Dataset:
        return Dataset.from_list([{"id": text, "text": text} for text in texts])

    split = {
        "queries": rows(QUERIES), "corpus": rows(DOCUMENTS),
        "relevant_docs": {query: {DOCUMENTS[number]: 1} for number, query in enumerate(QUERIES)}, "top_ranked": None,
    }  # fmt: skip

    class Retrieval(retrieval.MockRetrievalTask):
        metadata = retrieval.MockRetrievalTask.metadata.model_copy(update={"eval_splits": ["test"]})

        def load_data(self, **options):
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    class Reranking(reranking.MockRerankingTask):
        def load_data(self, **options):
            top = {"top_ranked": {query: DOCUMENTS[number:] for number, query in enumerate(QUERIES)}}
            self.dataset, self.data_loaded = {"default": {"test": split | top}}, True

    class Similarity(sts.MockSTSTask):
        def load_data(self, **options):
            pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
            columns = {"sentence1": [a for a, _ in pairs], "sentence2": [b for _, b in pairs]}
            scores = [float(len({*a.split()} & {*b.split()})) for a, b in pairs]
            self.dataset, self.data_loaded = {"test": Dataset.from_dict({**columns, "score": scores})}, True

    return [Retrieval(), Reranking(), Similarity()]


def theirs(kind: str, directory: Path):
    """A SentenceTransformer or a CrossEncoder in float32."""
    library = pytest.importorskip("sentence_transformers")
    return getattr(library, kind)(str(directory), device="cpu", model_kwargs={"dtype": "float32"})


def scores_of(model, some: list) -> dict[str, dict[str, float]]:
    """All numbers of each task, by task and metric."""
    import mteb

    found = mteb.evaluate(model, some, cache=None, show_progress_bar=False)
    return {
        result.task_name: {name: value for name, value in result.scores["test"][0].items() if isinstance(value, float)}
        for result in found.task_results
    }


def test_scores_are_those_of_sentence_transformers(encoder, directory):
    expected, found = scores_of(theirs("SentenceTransformer", directory), tasks()), scores_of(encoder, tasks())
    assert len(found) == 3 and all("main_score" in each for each in found.values())
    for name in found:
        print(name, found[name]["main_score"], expected[name]["main_score"])
        assert found[name] == pytest.approx(expected[name], abs=1e-4, nan_ok=True), name
    assert 0 < found["MockRetrievalTask"]["main_score"] < 1


def test_embeddings_are_those_of_sentence_transformers(encoder, directory):
    exact = theirs("SentenceTransformer", directory)
    assert max(map(len, DOCUMENTS)) > 48, "some texts are cut"
    for name, prompt_type in (("query", "query"), ("document", "document"), ("STS", None), (None, None)):
        task = STS if name == "STS" else SimpleNamespace(name="X", type="Y")
        kind = SimpleNamespace(value=prompt_type) if prompt_type else None
        found = encoder.encode([{"text": DOCUMENTS[:3]}, {"text": DOCUMENTS[3:]}], task_metadata=task, hf_split="",
                               hf_subset="", prompt_type=kind, batch_size=2, show_progress_bar=False)  # fmt: skip
        expected = exact.encode(DOCUMENTS, prompt_name=name, show_progress_bar=False)
        assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-5, name


def test_a_cross_encoders_scores_are_those_of_sentence_transformers(module, tmp_path):
    directory = save_demo_classifier(tmp_path, 1)
    # sentence-transformers would put the pairs into the template, as messages of the roles "query" and "document".
    (directory / "chat_template.jinja").unlink()
    model = module.NanovllmCrossEncoder(str(directory), **OPTIONS)
    some = tasks()[1:2]
    expected = scores_of(theirs("CrossEncoder", directory), some)
    for name, found in scores_of(model, some).items():
        print(name, found["main_score"], expected[name]["main_score"])
        assert found == pytest.approx(expected[name], abs=1e-4, nan_ok=True), name
    model.llm.close()


def test_a_text_that_cannot_run_and_an_unknown_argument_are_refused(encoder):
    given = {"task_metadata": STS, "hf_split": "", "hf_subset": "", "show_progress_bar": False}
    with pytest.raises(TypeError, match="unknown argument 'precision'"):
        encoder.encode([{"text": ["a"]}], **given, precision="int8")
    with pytest.raises(ValueError, match="the prompt is empty"):
        encoder.encode([{"text": ["a", ""]}], **given, prompt_name="document")
