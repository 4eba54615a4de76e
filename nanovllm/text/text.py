"""`Text`: makes prompts ready for the engine, and texts of its completions."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nanovllm.logprobs import TokenPieces
from nanovllm.models.directory import find_model
from nanovllm.prompts import Conversation, EncodedPrompt, as_token_ids, without_dict
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import ChatTemplate, Marks
from nanovllm.text.load_tokenizer import load_tokenizer
from nanovllm.text.pairs import encode_labels, encode_pairs
from nanovllm.text.stop_strings import StopStrings, cut, undecodable
from nanovllm.text.tokenizer import NO_TOKENIZER, Tokenizer, all_or_each


class Completion(NamedTuple):
    """The tokens of a completion, its request's parameters, and whether it follows a text; see Text.follows_text."""

    token_ids: list[int]
    params: SamplingParams
    follows_text: bool = False


class Text(Tokenizer):
    """All that depends on a model's tokenizer. Without one, every prompt that needs it gets an error."""

    @classmethod
    def of_model(cls, directory: Path) -> "Text":
        """Loads the tokenizer in `directory`, if there is one; a ValueError if it cannot be loaded."""
        return cls(load_tokenizer(directory))

    @classmethod
    def of_options(cls, directory: Path, tokenizer: str | None) -> "Text":
        """Loads the tokenizer that the option `tokenizer` names, or that of the model in `directory`.

        Raises:
            ValueError: there is no such tokenizer, or it cannot be loaded.
        """
        if tokenizer is None:
            return cls.of_model(directory)
        text = cls.of_model(find_model(tokenizer, None, with_weights=False, option="tokenizer"))
        if text.tokenizer is None:
            raise ValueError(f"tokenizer={tokenizer!r} holds no tokenizer")
        return text

    def limited_to(self, max_model_len: int) -> "Text":
        """A copy that refuses texts that are certain to have more tokens."""
        return Text(self.tokenizer, max_model_len)

    # From prompts to token ids

    def encode(
        self,
        prompts: Sequence[Any],
        add_special_tokens: bool = True,
        splits_special: bool = False,
        max_tokens: int | None = None,
    ) -> list[EncodedPrompt]:
        """Encodes prompts: strings, token ids, dicts of either, or dicts of a conversation, whose special tokens are
        those of the chat template. A ValueError is a prompt that cannot run.

        splits_special: a special token in a string or a message is ordinary text.
        max_tokens: cut longer prompts to this many tokens, on the tokenizer's truncation_side.
        """
        bare = [without_dict(prompt) for prompt in prompts]
        texts = [prompt for prompt in bare if isinstance(prompt, str)]
        token_ids = iter(self.encode_texts(texts, add_special_tokens, splits_special, max_tokens))
        conversations = [prompt for prompt in bare if isinstance(prompt, Conversation)]
        answers = iter(self._encode_each_conversation(conversations, splits_special) if conversations else ())
        encoded = []
        for prompt in bare:
            if isinstance(prompt, str):
                encoded.append(EncodedPrompt.of(prompt, next(token_ids)))
            elif isinstance(prompt, Conversation):
                encoded.append(next(answers))
            elif isinstance(prompt, EncodedPrompt):
                encoded.append(prompt)
            else:
                encoded.append(EncodedPrompt.of(None, as_token_ids(prompt)))
        side = getattr(self.tokenizer, "truncation_side", "right")
        return encoded if max_tokens is None else [each.cut(max_tokens, side) for each in encoded]

    def encode_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[EncodedPrompt]:
        """Encodes pairs of a context and a continuation, whose tokens are scored. Each is a string or token ids.

        Two strings are tokenized as one text. If the context alone has k tokens, the tokens after the first k are the
        continuation's. Spaces that end the context count as the continuation's. An empty context is replaced by the
        token that begins texts, or else the one that ends them. These are lm-evaluation-harness's rules for models
        whose tokenizer adds no special tokens; if it adds some, they begin the context. A conversation is refused.
        """
        return encode_pairs(pairs, self.encode, self.first_token_ids)

    def encode_labels(
        self, rows: Sequence[tuple[Any, Sequence[Any]]], add_special_tokens: bool = True
    ) -> list[list[EncodedPrompt]]:
        """Encodes each prompt with each of its labels, whose tokens are scored. A conversation is rendered by the chat
        template first, so a label begins its answer. A text with a label that is a text is tokenized as one text.
        Special tokens that the tokenizer puts at the end of a text are left out, because the text goes on."""
        rendered = [self._rendered(prompt) for prompt, _ in rows]
        kinds: tuple[list[Any], list[Any]] = ([], [])
        is_chat = [context is not prompt for context, (prompt, _) in zip(rendered, rows, strict=True)]
        for context, (_, labels), chat in zip(rendered, rows, is_chat, strict=True):
            kinds[chat].append((context, labels))
        encode = self._encode_open if add_special_tokens else partial(self.encode, add_special_tokens=False)
        others = iter(encode_labels(kinds[False], encode, self.first_token_ids))
        # The template writes its special tokens itself.
        of_chats = iter(encode_labels(kinds[True], partial(self.encode, add_special_tokens=False), []))
        return [next(of_chats if chat else others) for chat in is_chat]

    def _encode_open(self, prompts: Sequence[Any], add_special_tokens: bool = True) -> list[EncodedPrompt]:
        """Like `encode`, but a text has no special tokens at its end."""
        num_closing = self.num_closing if add_special_tokens and self.tokenizer is not None else 0
        return [
            each._replace(token_ids=each.token_ids[: len(each.token_ids) - num_closing])
            if isinstance(prompt, str)
            else each
            for prompt, each in zip(prompts, self.encode(prompts, add_special_tokens), strict=True)
        ]

    def _rendered(self, prompt: Any) -> Any:
        """The text of a prompt that is a conversation, or the reason why it has none; any other prompt as it is."""
        bare = without_dict(prompt) if isinstance(prompt, Mapping) else prompt
        if not isinstance(bare, Conversation):
            return prompt
        try:
            return self._template.render(bare.messages, self._template.options(bare.template_kwargs), None)
        except (TypeError, ValueError) as error:
            return ValueError(str(error))

    def encode_conversations(
        self,
        conversations: Sequence[Any],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any] | None,
        splits_special: bool = False,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[EncodedPrompt]:
        """Encodes conversations, through the chat template.

        splits_special: a special token in a message is ordinary text.
        options: more arguments of `apply_chat_template`, such as `tools`.

        Raises:
            ValueError: the tokenizer has no chat template, or cannot split special tokens.
            TypeError: `template_kwargs` is not a dict, or holds an argument that is set here.
        """
        whole = self._template.options(template_kwargs, {**options, "add_generation_prompt": add_generation_prompt})
        marks = self._template.marks if splits_special else None
        texts = [self._template.render(messages, whole, marks) for messages in conversations]
        return self._encode_rendered(texts, marks)

    def render(self, messages: Any, template_kwargs: Any, given: Mapping[str, Any]) -> str:
        """The text of one conversation.

        Raises:
            TypeError, ValueError: as `encode_conversations`; or the chat template cannot render the conversation.
        """
        text = self._template.render(messages, self._template.options(template_kwargs, given), None)
        if isinstance(text, ValueError):
            raise text
        return text

    def _encode_each_conversation(
        self, conversations: Sequence[Conversation], splits_special: bool
    ) -> list[EncodedPrompt]:
        """Like `encode_conversations`, but each conversation has its own options, and an exception becomes its error.
        All are tokenized together."""
        texts: list[str | ValueError] = []
        marks = None
        for messages, template_kwargs in conversations:
            try:
                options = self._template.options(template_kwargs)
                marks = self._template.marks if splits_special else None
                texts.append(self._template.render(messages, options, marks))
            except (TypeError, ValueError) as error:
                texts.append(ValueError(str(error)))
        return self._encode_rendered(texts, marks)

    def _encode_rendered(self, texts: list[str | ValueError], marks: Marks | None) -> list[EncodedPrompt]:
        # The template writes its special tokens itself.
        return self.encode(texts, add_special_tokens=False) if marks is None else marks.encode(texts)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    # From completions to texts

    def stop_strings(self, params: SamplingParams, follows_text: bool = False) -> StopStrings:
        """A predicate that finds the stop strings of one completion; a ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(f"{NO_TOKENIZER}, so stop strings cannot be found; use stop_token_ids")
        return StopStrings(self, params, follows_text)

    def follows_text(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> bool:
        """Whether a completion's text goes on from its prompt's text, so that its first space stays.

        A choice begins a text of its own. In other structured outputs every space counts.
        """
        if not params.detokenize or not self.drops_first_space:
            return False
        if params.structured_outputs is not None:
            return params.structured_outputs.choice is None
        return any(self.has_text(each, params.skip_special_tokens) for each in prompt_token_ids)

    def pieces(self, params: SamplingParams, follows_text: bool = True) -> TokenPieces:
        """A function from a token id to what the token adds to a text of a request; see TokenLogprobs."""
        follows_text = follows_text or not params.detokenize
        return partial(self.piece, skip_special_tokens=params.skip_special_tokens, follows_text=follows_text)

    def complete(self, completions: Sequence[Completion]) -> list[tuple[str | ValueError, str | None]]:
        """Each completion's text, cut at its first stop string, and that string, or None if there is none. The text is
        empty without a tokenizer and with `detokenize=False`, and a ValueError if the tokenizer fails."""
        texts: list[tuple[str | ValueError, str | None]] = [("", None)] * len(completions)
        for skips in (True, False) if self.tokenizer is not None else ():
            indices = [
                index
                for index, (_, params, _) in enumerate(completions)
                if params.detokenize and params.skip_special_tokens is skips
            ]
            found = all_or_each(self._cut_texts, [completions[index] for index in indices])
            for index, text in zip(indices, found, strict=True):
                texts[index] = (undecodable(text), None) if isinstance(text, BaseException) else text
        return texts

    def _cut_texts(self, completions: list[Completion]) -> list[tuple[str, str | None]]:
        """`complete` for completions that agree about special tokens."""
        skips, follows = completions[0].params.skip_special_tokens, [each.follows_text for each in completions]
        decoded = self.decode([each.token_ids for each in completions], skips, follows)
        return list(map(self._cut, decoded, completions))

    def _choice_of(self, completion: Completion) -> str | None:
        """The choice that a completion spells in full; SentencePiece strips and adds leading spaces of texts."""
        form, token_ids = completion.params.structured_outputs, completion.token_ids
        if form is None or form.choice is None or not completion.params.skip_special_tokens or not token_ids:
            return None
        spelled = token_ids[:-1] if token_ids[-1] in self.special_ids.values() else token_ids
        found = self.tokenizer(list(form.choice), add_special_tokens=False)["input_ids"]
        return next((choice for choice, ids in zip(form.choice, found, strict=True) if ids == spelled), None)

    def _cut(self, text: str, completion: Completion) -> tuple[str, str | None]:
        token_ids, params, follows_text = completion
        before = self.whole_characters(token_ids[: params.min_tokens], is_cut=False) if params.stop else []
        start = len(self.decode([before], params.skip_special_tokens, [follows_text])[0]) if before else 0
        text, stop = cut(self._choice_of(completion) or text, start, params)
        if stop is None and token_ids and len(token_ids) > params.min_tokens:
            stop = next((stop for stop in params.stop if self.special_ids.get(stop) == token_ids[-1]), None)
        return text, stop
