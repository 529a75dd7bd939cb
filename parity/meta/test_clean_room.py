"""No file of reimpl shares four or more consecutive lines of code with the installed transformers.

Two views are compared. As *lines*: what stands in the file, without blank lines, comments, docstrings, imports and
lines of mere punctuation, whitespace folded; against every file of transformers. As *statements*: what is left once the
parser has forgotten layout and quotes too, so that rewrapping hides nothing; against the files that are nearest.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers.models.llama import modeling_llama

import reimpl

RUN = 4
LLAMA = "models/llama/modeling_llama.py"
OURS = sorted(Path(reimpl.__path__[0]).rglob("*.py"))
THEIRS = Path(transformers.__path__[0])
NEAREST = sorted(THEIRS.glob("*.py")) + [
    path for our in OURS for path in sorted(THEIRS.glob(f"models/{our.stem}/*.py"))
]

COMMENT = re.compile(r"(^|\s{2,})#.*$")
IMPORT = re.compile(r"^(import|from)\s")
TRIPLE = ('"""', "'''")
QUOTES = re.compile(r"^[rRfFbBuU]*(\"\"\"|''')")
WORD = re.compile(r"\w")

Views = Callable[[str], Iterator[str]]
Shared = tuple[str, ...]


def lines(source: str) -> Iterator[str]:
    """The lines of code. Much faster than a tokeniser, and there are a million and a half to read."""
    closing = ""  # what ends the string or import we are in
    for line in source.splitlines():
        text = line.strip()
        if closing:
            closing = "" if closing in text else closing
            continue
        closing = next((quotes for quotes in TRIPLE if text.count(quotes) % 2), "")
        if QUOTES.match(text):
            continue
        text = " ".join(COMMENT.sub("", text).split())
        if IMPORT.match(text):
            closing = ")" if "(" in text and ")" not in text else ""
        elif WORD.search(text):
            yield text


def statements(source: str) -> Iterator[str]:
    """The lines of code as Python itself would write them: one per statement, quotes and parentheses unified."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [each for each in block if not is_no_code(each)])
    return filter(WORD.search, map(str.strip, ast.unparse(tree).splitlines()))


def is_no_code(node: ast.stmt) -> bool:
    """Whether a statement is an import or a docstring."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def runs(code: Iterable[str]) -> Iterator[Shared]:
    """Every stretch of RUN consecutive lines."""
    stretch: Shared = ()
    for line in code:
        stretch = (*stretch[1 - RUN :], line)
        if len(stretch) == RUN:
            yield stretch


def shared(ours: set[Shared], theirs: Iterable[str]) -> list[str]:
    """The runs that stand in both."""
    return ["\n".join(run) for run in runs(theirs) if run in ours]


@cache
def reference_code(view: Views) -> dict[str, list[str]]:
    paths = sorted(THEIRS.rglob("*.py")) if view is lines else NEAREST
    return {str(path.relative_to(THEIRS)): list(view(path.read_text("utf-8"))) for path in paths}


each_view = pytest.mark.parametrize("view", [lines, statements])


@each_view
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_no_run_of_lines_is_shared(path: Path, view: Views) -> None:
    ours = set(runs(view(path.read_text("utf-8"))))
    found = {name: both for name, code in reference_code(view).items() if (both := shared(ours, code))}
    assert not found, f"{path.name} shares {RUN} lines with {', '.join(found)}"


@each_view
def test_the_reference_was_read(view: Views) -> None:
    code = reference_code(view)
    assert {"cache_utils.py", "masking_utils.py", "modeling_rope_utils.py", "activations.py", LLAMA} <= code.keys()
    assert len(code[LLAMA]) > 200


class TestACopyIsSeen:
    """Each of these is a copy of a function of the reference."""

    SOURCE = inspect.getsource(modeling_llama.apply_rotary_pos_emb)
    WRAPPED = inspect.getsource(modeling_llama.eager_attention_forward)

    @staticmethod
    def found(view: Views, source: str) -> bool:
        return bool(shared(set(runs(view(source))), reference_code(view)[LLAMA]))

    @each_view
    def test_verbatim(self, view: Views) -> None:
        assert self.found(view, self.SOURCE)

    @each_view
    def test_indented_as_a_method_among_other_code(self, view: Views) -> None:
        method = "class Ours:\n" + textwrap.indent("x = 1\n" + self.SOURCE, "      ") + "y = 2\n"
        assert self.found(view, method)

    @each_view
    def test_with_comments_blank_lines_docstrings_and_imports_between(self, view: Views) -> None:
        between = [
            "",
            "    # why",
            '    """What it is."""',
            "    import math",
            "    from math import (",
            "        pi,",
            "    )",
        ]
        head, *body = [line for line in view(self.SOURCE) if not line.startswith(("def", "@"))]
        padded = "\n".join(["def f():", "    " + head, *(row for line in body for row in (*between, "    " + line))])
        assert self.found(view, padded)

    def test_wrapped_anew_and_requoted(self) -> None:
        anew = "\n".join(
            line if line.startswith("def") or "(" not in line else line.replace("(", "(\n", 1)
            for line in ast.unparse(ast.parse(self.WRAPPED)).splitlines()
        )
        assert not self.found(lines, anew)
        assert self.found(statements, anew)

    def test_from_four_lines_on(self) -> None:
        original = reference_code(lines)[LLAMA]
        assert not self.found(lines, "\n".join(original[100 : 100 + RUN - 1]))
        assert self.found(lines, "\n".join(original[100 : 100 + RUN]))
