"""Columns of a job's input: those that make its rows, and the data columns, which the output repeats.

In JSON Lines, a column is a key.
"""

import difflib
import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from string import Formatter
from typing import Any

from nanovllm import PoolingParams
from nanovllm.jobs.errors import JobError
from nanovllm.jobs.fields import PAIR, conversation_of, pair_of, prompt_of

logger = logging.getLogger("nanovllm.jobs")

PROMPTS = ("prompt", "messages", "token_ids")
PLAIN_KEYS = ("id", *PROMPTS, "params", "chat_template_kwargs", "task", "adapter")
# Parameters that are keys of a plain row with a task. A job has no output for states of other layers.
_NOT_KEYS = ("task", "hidden_states_layers")
POOLING_KEYS = tuple(field.name for field in fields(PoolingParams) if field.name not in _NOT_KEYS)
# The keys of each kind of plain row: of one that generates text, and of those with a task.
KEYS: dict[Any, tuple[str, ...]] = {
    "plain": PLAIN_KEYS,
    **dict.fromkeys(("embed", "classify", "reward", "label"), (*PLAIN_KEYS, *POOLING_KEYS)),
    "score": ("id", *PAIR, "params", "task", "adapter", *POOLING_KEYS),
}
LABELS_ADVICE = """--params '{"labels": ["yes", "no"]}'"""
OPENAI_KEYS = frozenset(("custom_id", "url", "body"))
# Names that outputs have. A name such as "input_text" is changed too, so that no two names become one.
_OF_OUTPUTS = "id|text|outputs|num_prompt_tokens|prompt_logprobs|error|row|custom_id|response"
_TAKEN = re.compile(f"(input_)*({_OF_OUTPUTS})")
_TAKEN_WITH_TASKS = re.compile(f"(input_)*({_OF_OUTPUTS}|embedding|label|probs|logprobs|score|data)")


@lru_cache(maxsize=4096)
def _output_name(name: str, has_tasks: bool) -> str:
    return f"input_{name}" if (_TAKEN_WITH_TASKS if has_tasks else _TAKEN).fullmatch(name) else name


def _flag(name: str) -> str:
    """The command's name of an option."""
    return f"--{name.replace('_', '-')}"


def kind_of_task(task: Any) -> Any:
    """The kind of a plain row with this task; a ValueError if there is no such task."""
    kind = "plain" if task == "generate" else task
    if not isinstance(task, str) or task == "plain" or kind not in KEYS:
        raise ValueError(f'"task" must be generate, {", ".join(list(KEYS)[1:-1])} or score, not {task!r}')
    return kind


@dataclass(frozen=True)
class Columns:
    """The columns that make the rows, as the options of a job name them. Without any option, the rows are plain rows
    and OpenAI Batch rows.

    Args:
        prompt_column: the column with the prompts.
        messages_column: the column with the conversations.
        id_column: the column with the ids.
        prompt: a template of prompts, such as "Translate: {text}", whose fields are names of columns.
        chat: whether a prompt becomes the user's message of a conversation.
        chat_template_kwargs: arguments of the chat template for all conversations.
        query_column, document_column: for the task "score", the columns with both texts; "query" and "document" by
            default.
        adapter_column: the column with the names of adapters.
        task: the task of plain rows and of rows of named columns.

    Raises:
        ValueError: two options contradict each other, or the template is wrong.
    """

    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    query_column: str | None = None
    document_column: str | None = None
    adapter_column: str | None = None
    task: str = "generate"

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.prompt_column, self.messages_column, self.prompt)) > 1:
            raise ValueError("give only one of prompt_column, messages_column and prompt")
        kind_of_task(self.task)
        pair = self.given.keys() & {"query_column", "document_column"}
        if self.task != "score" and pair:
            raise ValueError(f"{_flag(min(pair))} needs the task 'score' (--task score)")
        if self.task == "score" and (others := self.given.keys() - pair - {"id_column", "adapter_column"}):
            advice = "name the columns of its texts with --query-column and --document-column"
            raise ValueError(f"the task 'score' does not take {_flag(min(others))}; {advice}")
        if self.chat and self.messages_column is not None:
            raise ValueError("messages_column has whole conversations, and chat makes them of prompts; give only one")
        if self.chat_template_kwargs is not None and not self.chat and self.messages_column is None:
            raise ValueError("chat_template_kwargs need chat or messages_column: a prompt has no chat template")
        if not self._names:
            raise ValueError(f"the prompt {self.prompt!r} names no column; write it like 'Translate: {{text}}'")

    @cached_property
    def given(self) -> dict[str, Any]:
        """The options that name columns and differ from their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "task"}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @property
    def id_name(self) -> str:
        return "id" if self.id_column is None else self.id_column

    @property
    def json_names(self) -> tuple[str | None, ...]:
        """Columns of a table whose strings may be JSON text. A prompt never is."""
        return (
            (self.messages_column,) if self.given else ("params", "chat_template_kwargs", "body", "messages", "labels")
        )

    @cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        """The template's texts, each with the column that follows it."""
        if self.task == "score":
            return [("", self.query_column or PAIR[0]), ("", self.document_column or PAIR[1])]
        if self.prompt is None:
            return [("", self.messages_column or self.prompt_column or "prompt")]
        try:
            found = list(Formatter().parse(self.prompt))
        except ValueError as error:
            raise ValueError(f"the prompt {self.prompt!r}: {error}; write a brace of the text twice") from None
        if any(name == "" or form or conversion for _, name, form, conversion in found):
            advice = "write a brace of the text twice"
            raise ValueError(f"the prompt {self.prompt!r} needs only the name of a column in its braces; {advice}")
        return [(text, name) for text, name, _, _ in found]

    @cached_property
    def _names(self) -> list[str]:
        return [name for _, name in self._parts if name is not None]

    def check(self, names: Collection[str], path: str, is_table: bool) -> None:
        """Raises a JobError if a named column is missing, or if a table has no column of prompts.

        Args:
            names: a table's columns, or the keys of the first rows.
            path: the input, for the error.
        """
        there = f"it has {', '.join(map(repr, names))}"
        others = [name for name in (self.id_column, self.adapter_column) if name is not None]
        for name in [*self._names, *others] if self.given else []:
            if names and name not in names:
                raise JobError(f"{path} has no column {name!r}; {there}")
        if self.given or not is_table:
            return
        if set(names).isdisjoint((*PROMPTS, *(PAIR if self._has_tasks(names) else ()), "custom_id", "body")):
            pair = "columns 'query' and 'document'; name them with --query-column and --document-column"
            prompts = "column with prompts; name one with --prompt or --prompt-column"
            raise JobError(f"{path} has no {pair if self.task == 'score' else prompts}: {there}")
        for name in self.carried(names):
            close = difflib.get_close_matches(name, PLAIN_KEYS, n=1)
            if close and close[0] not in names:
                logger.warning("the output only repeats the column %r; did you mean %r?", name, close[0])

    def _has_tasks(self, names: Collection[str]) -> bool:
        """Whether rows with these columns may have a task."""
        return self.task != "generate" or ("task" in names and not self.given)

    def of_rows(self, names: Collection[str]) -> dict[str, str]:
        """The columns of a table that rows need, each with its name in the row. The id is first, where it is found even
        in a row that is too long."""
        keys = {*self._names, self.id_name, self.adapter_column} if self.given else {*PLAIN_KEYS}
        if not self.given and self._has_tasks(names):
            keys |= {*POOLING_KEYS, *PAIR}
        # A table of prompts without a "url" may have a "body" of its own, such as that of a mail.
        is_openai = not {"custom_id", "body"}.isdisjoint(names) and ("url" in names or set(names).isdisjoint(PROMPTS))
        if is_openai and not self.given:
            keys |= {"method", *OPENAI_KEYS}
        found = [name for name in names if name in keys]
        return {name: name for name in sorted(found, key=lambda name: name not in (self.id_name, "custom_id"))}

    def carried(self, names: Collection[str]) -> dict[str, str]:
        """The data columns of a table, or of a line if columns are named, each with its name in the output."""
        others = self.of_rows(names) if not self.given else ("id",) if self.id_name == "id" else ()
        has_tasks = self._has_tasks(names)
        return {name: _output_name(name, has_tasks) for name in names if name not in others}

    def prompt_of(self, row: dict[str, Any]) -> Any:
        """A row's prompt, as `LLM.generate_iter` takes it; a ValueError names the column that has none."""
        for name in self._names:
            if (value := row.get(name)) is None or value != value:  # NaN is pandas' null
                raise ValueError(f"the column {name!r} is null or missing")
        name = self._names[0]
        if self.task == "score":
            return pair_of(row, self._names)
        if self.messages_column is not None:
            return self._conversation(row[name])
        found = prompt_of(name, row[name]) if self.prompt is None else self._filled(row)
        if not self.chat:
            return found
        if not isinstance(found, str):
            raise ValueError(f"the column {name!r} holds token ids, and a message needs text")
        return self._conversation([{"role": "user", "content": found}])

    def _conversation(self, messages: Any) -> dict[str, Any]:
        return conversation_of({"messages": messages, "chat_template_kwargs": self.chat_template_kwargs or {}})

    def _filled(self, row: dict[str, Any]) -> str:
        found = []
        for text, name in self._parts:
            value = "" if name is None else row[name]
            try:
                found += [
                    text,
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False),
                ]
            except ValueError:
                raise ValueError(f"the column {name!r} holds NaN or an infinity, which JSON does not have") from None
        return "".join(found)
