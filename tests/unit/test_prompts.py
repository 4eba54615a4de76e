"""Lists of prompts as programs hold them: arrays, columns of tables, generators."""

import numpy as np
import pytest

from nanovllm.prompts import as_conversation_list, as_prompt_list, as_token_ids


class Series:
    """As pandas' Series: it iterates over values, looks up labels, and is neither true nor false."""

    def __init__(self, values):
        self._values = list(values)

    def tolist(self):
        return list(self._values)

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)

    def __getitem__(self, label):
        raise KeyError(label)

    def __bool__(self):
        raise ValueError("the truth value of a Series is ambiguous")


class Column:
    """As a column of `datasets`: a sequence of Python values, but no list."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, index):
        return self._values[index]

    def __len__(self):
        return len(self._values)

    def __iter__(self):
        return iter(self._values)


def arrow(values):
    return pytest.importorskip("pyarrow").chunked_array([values])


def pandas_series(values):
    return pytest.importorskip("pandas").Series(values, index=range(7, 7 + len(values)))


def generator(values):
    yield from values


KINDS = [list, tuple, generator, Series, Column, arrow, pandas_series]


@pytest.mark.parametrize("kind", [*KINDS, np.array])
def test_a_column_of_texts_is_a_list_of_prompts(kind):
    assert as_prompt_list(kind(["one", "two"])) == ["one", "two"]
    assert as_prompt_list(kind([5, 6])) == [[5, 6]], "numbers are the tokens of one prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_token_ids_is_a_list_of_prompts(kind):
    found = [as_token_ids(prompt) for prompt in as_prompt_list(kind([[1, 2], [3]]))]
    assert found == [[1, 2], [3]]
    if kind is not arrow:
        assert [as_token_ids(each) for each in as_prompt_list(kind([np.array([1, 2]), np.array([3])]))] == found


def test_a_table_of_token_ids_has_a_prompt_per_row():
    assert as_prompt_list(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert as_prompt_list(list(np.array(["one", "two"]))) == ["one", "two"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [None, float("nan")], ids=str)
def test_a_missing_prompt_is_that_rows_error(kind, missing):
    if kind is arrow and missing is not None:
        pytest.skip("Arrow has null for it")
    text, error = as_prompt_list(kind(["one", missing]))
    reasons = [f"a prompt must be a string or a list of token ids, not {name}" for name in ("None", "nan")]
    assert text == "one" and str(as_token_ids(error)) in reasons


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("kind", [*KINDS, lambda values: np.array(values, dtype=object)])
def test_a_column_of_conversations_is_a_list_of_them(kind):
    """Only lists and tuples were taken."""
    assert [[dict(each) for each in chat] for chat in as_conversation_list(kind([CHAT, CHAT]))] == [CHAT, CHAT]
    assert as_conversation_list(kind(CHAT)) == [CHAT], "one conversation"


@pytest.mark.parametrize("wrong", ["Hi", {"role": "user"}, b"Hi", 5, {1}, None], ids=str)
def test_what_is_not_a_list_of_conversations_is_refused(wrong):
    with pytest.raises(TypeError, match="conversations must be a list of messages or a list of such lists"):
        as_conversation_list(wrong)


@pytest.mark.parametrize("take", [as_prompt_list, as_conversation_list])
@pytest.mark.parametrize("module, name", [("pandas", "DataFrame"), ("pyarrow", "table"), (None, None)])
def test_a_whole_table_is_refused(take, module, name):
    """The names of its columns became the prompts."""

    class Table(dict):
        columns = ("prompt",)

    make = Table if module is None else getattr(pytest.importorskip(module), name)
    with pytest.raises(TypeError, match=r"must not be a table \((.*Table|DataFrame)\); give one of its columns"):
        take(make({"prompt": ["one", "two"]}))
