"""nanovllm as a model of mteb, the benchmark of text embeddings. Written against mteb 2.26.

    model = NanovllmEncoder("Qwen/Qwen3-Embedding-0.6B")
    mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]))

Prompts, lengths, pooling and similarity are those of the checkpoint's sentence-transformers files, as in mteb's own
wrapper of sentence-transformers.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ScoringFunction

from nanovllm import LLM


class NanovllmEncoder(AbsEncoder):
    """An embedder for mteb. Texts that are too long lose their ends.

    Args:
        model, revision, options: LLM's.

    Raises:
        TypeError, ValueError, RuntimeError: as LLM.
    """

    def __init__(self, model: str, revision: str | None = None, **options: Any):
        self.llm = LLM(model, revision=revision, **{"runner": "pooling", **options})
        config = self.llm.pooling_config
        self.model_prompts = {} if config is None else dict(config.prompts)
        similarity = "cosine" if config is None else config.similarity
        self.mteb_model_meta = _meta(model, revision, similarity_fn_name=ScoringFunction(similarity))

    def encode(
        self,
        inputs: Iterable[dict[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int | None = None,
        show_progress_bar: bool = True,
        **params: Any,
    ) -> np.ndarray:
        """Embeds all texts in one call: float32 [num_texts, dimensions].

        Args:
            inputs: batches with a list "text" each, such as mteb's DataLoader.
            task_metadata, prompt_type: name the prompt that comes before each text, by mteb's rules. If none has such a
                name, it is the checkpoint's default prompt.
            batch_size: changes nothing, because the LLM itself fills its steps.
            params: for LLM.embed, such as `dimensions`.

        Raises:
            TypeError, ValueError: a text that cannot run, such as an empty one; nothing runs then. Or wrong `params`.
        """
        name = self.get_prompt_name(task_metadata, prompt_type)
        given = {"prompt_name": name, "truncate_prompt_tokens": -1, **params}
        outputs = self.llm.embed(_texts(inputs), use_tqdm=show_progress_bar, raise_on_error=True, **given)
        return np.array([output.embedding for output in outputs])


class NanovllmCrossEncoder:
    """A reranker for mteb: LLM.score. Pairs that are too long lose tokens at their end, except with a recipe.

    Args:
        model, revision, options: LLM's.
        recipe, instruction: as in LLM.score, such as "qwen3-reranker".

    Raises:
        TypeError, ValueError, RuntimeError: as LLM.
    """

    def __init__(
        self,
        model: str,
        revision: str | None = None,
        *,
        recipe: str | None = None,
        instruction: str | None = None,
        **options: Any,
    ):
        self.llm = LLM(model, revision=revision, **options)
        # The end of a recipe's prompt asks the question, so it cannot be cut.
        length = -1 if recipe is None else None
        self._params = {"recipe": recipe, "instruction": instruction, "truncate_prompt_tokens": length}
        self.mteb_model_meta = _meta(model, revision, model_type=["cross-encoder"])

    def predict(
        self,
        inputs1: Iterable[dict[str, Any]],
        inputs2: Iterable[dict[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int | None = None,
        show_progress_bar: bool = True,
        **params: Any,
    ) -> np.ndarray:
        """The score of each query of `inputs1` with the document of `inputs2`, float64 [num_pairs]. The arguments are
        those of `NanovllmEncoder.encode`, with `params` for LLM.score."""
        given = {**self._params, "use_tqdm": show_progress_bar, "raise_on_error": True, **params}
        return np.array([output.score for output in self.llm.score(_texts(inputs1), _texts(inputs2), **given)])


def _texts(inputs: Iterable[dict[str, Any]]) -> list[str]:
    return [text for batch in inputs for text in batch["text"]]


def _meta(model: str, revision: str | None, **more: Any) -> ModelMeta:
    return ModelMeta.create_empty({"name": str(model), "revision": revision, **more})
