"""Finds stop strings, while a completion grows and in its text."""

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import EXITS, Tokenizer


class StopStrings:
    """Tells after each token of one completion whether its text since `min_tokens` holds a stop string.

    It decodes a window of the last tokens that have text. Each of them adds at least a byte. So a stop string that the
    newest token completes spans at most as many tokens as it has bytes. Four more tokens make the window's first
    character whole.

    If the tokenizer fails, the completion ends, and `error` has the reason.

    Args:
        text: the model's tokenizer.
        params: the request's; `stop` is not empty.
        follows_text: whether the prompt has text, see Tokenizer.decode.
    """

    def __init__(self, text: Tokenizer, params: SamplingParams, follows_text: bool = False):
        self._text = text
        self._stop, self._min_tokens, self._skips = params.stop, params.min_tokens, params.skip_special_tokens
        self._follows_text, self._is_cut = follows_text, False
        self._window_size = max(len(stop.encode()) for stop in params.stop) + 4
        # A special token may be left out of the text.
        self._stop_ids = {text.special_ids[stop] for stop in params.stop if stop in text.special_ids}
        self._window: list[int] = []
        self._num_tokens = 0
        self.error: ValueError | None = None

    def __call__(self, token_id: int) -> bool:
        try:
            return self._ends(token_id)
        except EXITS:
            raise
        except BaseException as error:
            self.error = undecodable(error)
            return True

    def _ends(self, token_id: int) -> bool:
        self._num_tokens += 1
        counts = self._num_tokens > self._min_tokens
        if counts and token_id in self._stop_ids:
            return True
        if not self._text.has_text(token_id, self._skips):
            return False
        if not counts or len(self._window) == self._window_size:
            self._follows_text = self._is_cut = True  # a text of which the window holds no token
        if not counts:
            return False
        self._window = [*self._window[1 - self._window_size :], token_id]
        whole = self._text.whole_characters(self._window, self._is_cut)
        text = self._text.decode([whole], self._skips, [self._follows_text])[0]
        return any(stop in text for stop in self._stop)


def cut(text: str, start: int, params: SamplingParams) -> tuple[str, str | None]:
    """The text, cut at the first stop string from `start` on, and that string. If several begin there, the shortest
    counts. Without a stop string: the whole text and None."""
    ends = [(end, len(stop), stop) for stop in params.stop if (end := text.find(stop, start)) >= 0]
    if not ends:
        return text, None
    end, length, stop = min(ends)
    return text[: end + length if params.include_stop_str_in_output else end], stop


def undecodable(error: BaseException) -> ValueError:
    return ValueError(f"the completion cannot be decoded: {error}")
