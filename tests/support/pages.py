"""The documents' pages and their blocks of code.

A comment above a block, which readers do not see, says how to test it:

    <!-- before: CODE -->       runs before the block
    <!-- long: REASON -->       runs alone, with --long
    <!-- not run: REASON -->    is only compiled
    <!-- run -->                a shell block that runs; in others, only the commands' options are checked
"""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


class Block(NamedTuple):
    """A block of code: its page, the line that it begins at, its language, and the comment above it."""

    page: str
    line: int
    language: str
    comment: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def argument(self, keyword: str) -> str | None:
        """The text after a keyword in the comment; None without the keyword."""
        found = re.fullmatch(rf"{keyword}:?(.*)", self.comment, re.DOTALL)
        return found and found[1].strip()

    @property
    def is_left_out(self) -> bool:
        """Whether it runs only with --long, or not at all."""
        return self.argument("long") is not None or self.argument("not run") is not None

    @property
    def expected_output(self) -> list[str]:
        """The comments below lines that print."""
        expected: list[str] = []
        prints = False
        for line in self.code.splitlines():
            if not line.lstrip().startswith("#"):
                prints = "print(" in line or (prints and not line.strip())
            elif prints:
                expected.append(line.strip()[2:])
        return expected


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    pattern = r"(?:<!-- ((?:(?!-->).)*?)\s*-->\n)?^ *```(\w*)\n(.*?)^ *```$"
    text = read(page)
    return [
        Block(page, text.count("\n", 0, found.start(3)), found[2], (found[1] or "").strip(), textwrap.dedent(found[3]))
        for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def prose_of(page: str) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", read(page), flags=re.MULTILINE | re.DOTALL)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
