"""Random problems with their answers, for training the bundled model and for testing it.

A hash of a question's text decides whether it belongs to training or to the test (`is_held_out`), so the model was
trained on no test question. Each answer follows from its question alone, so a program can check it.
"""

import random
from collections.abc import Iterator

import xxhash

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (  # noqa: SIM905 - forty quoted words would be harder to read
    "apple banana cherry orange planet garden window letter summer winter yellow purple silver monkey rabbit "
    "turtle pencil basket bottle kitchen station library science history machine engine python kernel tensor "
    "mississippi paged cache batch prefix token block table queue logic memory"
).split()


def _word(rng: random.Random, shortest: int, longest: int) -> str:
    if rng.random() < 0.2:
        word = rng.choice(WORDS)
        if shortest <= len(word) <= longest:
            return word
    return "".join(rng.choices(LETTERS, k=rng.randint(shortest, longest)))


def _number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 4))


def _add(rng):
    a, b = _number(rng), _number(rng)
    return f"What is {a} + {b}?", str(a + b)


def _subtract(rng):
    b, a = sorted((_number(rng), _number(rng)))
    return f"What is {a} - {b}?", str(a - b)


def _larger(rng):
    a, b = _number(rng), _number(rng)
    return f"Which is larger, {a} or {b}?", str(max(a, b))


def _reverse(rng):
    word = _word(rng, 3, 11)
    return f"Reverse the word {word}.", word[::-1]


def _sort(rng):
    word = _word(rng, 3, 9)
    return f"Sort the letters of {word}.", "".join(sorted(word))


def _count_letter(rng):
    # Few different letters, or the answer would nearly always be 0 or 1.
    word = _word(rng, 4, 12)
    if word not in WORDS:
        word = "".join(rng.choices(rng.sample(LETTERS, rng.randint(1, 3)), k=len(word)))
    letter = rng.choice(word if rng.random() < 0.9 else LETTERS)
    return f"How many times does the letter {letter} appear in {word}?", str(word.count(letter))


def _upper(rng):
    word = _word(rng, 3, 12)
    return f"Write {word} in upper case.", word.upper()


def _count_up(rng):
    first = rng.randint(0, 90)
    last = first + rng.randint(2, 14)
    return f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1)))


KINDS = (_add, _add, _subtract, _larger, _reverse, _sort, _count_letter, _upper, _count_up)


def is_held_out(question: str) -> bool:
    """True for the one question in sixteen that training never sees."""
    return xxhash.xxh64_intdigest(question.encode()) % 16 == 0


def labelled_problems(seed: int, held_out: bool) -> Iterator[tuple[str, str, str]]:
    """Endless (kind, question, answer) triples; `held_out` chooses the side of the split."""
    rng = random.Random(seed)
    while True:
        make = rng.choice(KINDS)
        question, answer = make(rng)
        if is_held_out(question) == held_out:
            yield make.__name__.strip("_"), question, answer


def problems(seed: int, held_out: bool) -> Iterator[tuple[str, str]]:
    """`labelled_problems` without the kinds."""
    return ((question, answer) for _, question, answer in labelled_problems(seed, held_out))
