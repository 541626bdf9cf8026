"""Find turns of phrase that make English read like a translation.

Usage: ``python tools/prose.py [FILE or FOLDER ...]`` lists each place, and the rate per 10,000
words, in docstrings, comments, error messages and documents; by default of the whole project.
A low rate does not make good English: read aloud what you wrote.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFAULT = [ROOT / "src", ROOT / "docs", *sorted(ROOT.glob("*.md"))]
# What to write instead: start; a subject first; next to; a name of the actor; again; while; known.
PATTERNS = {
    "begin": r"\bbegin(?:s|ning|ning with)?\b(?! ?=)",
    "fronted Of": r"(?:^|[.;:] )Of (?!course)\w+",
    "beside": r"\bbeside\b",
    "bare who": r"(?:^|[.;:(,] )(?:for |of |by |to |with )?[Ww]ho (?!(?:is|are)\b[^.]*\?)",
    "anew": r"\banew\b",
    "meanwhile": r"\bmeanwhile\b",
    "told": r"\btold\b",
    "let go of": r"\blets? go\b",
    "can be had": r"\b(?:can't|cannot|can|to) be had\b",
    "at hand": r"\bat hand\b",
    "such": r"\bsuch (?:ones?|tiles|reads?|files?|slides?|pixels|patches)\b",
    "is there": r"\b(?:is|are) there(?: (?:already|yet|again))?[.,;]",
    "what is": (
        r"(?:^|[.;:] )What (?:is|has|was|lies|takes|holds|makes|a|the|one|they)\b(?![^.]*\?)"
    ),
    "in turn": r"\bin turn\b",
    "have X do": r"(?:^|[.;:] )Have (?:a|an|the|all|two|each)\b",
}
RULES = {name: re.compile(pattern, re.MULTILINE) for name, pattern in PATTERNS.items()}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file: line numbers and lines."""
    source = path.read_text(encoding="utf-8")
    yield from _of_markdown(source) if path.suffix == ".md" else _of_python(source)


def _of_markdown(source: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"<!--.*?-->|`[^`]*`", "", line)


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            yield from enumerate(text.splitlines(), node.body[0].lineno if node.body else 1)
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string[1:].strip()


def check(paths: Iterable[Path] = DEFAULT) -> tuple[list[str], int]:
    """Return the places to rewrite, and the number of words that were read."""
    found, words = [], 0
    for folder in paths:
        files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
        for path in (file for file in files if file.suffix in (".py", ".md")):
            for number, text in texts(path):
                words += len(text.split())
                found += [
                    f"{path}:{number}: {name}: {text.strip()}"
                    for name, rule in RULES.items()
                    if rule.search(text)
                ]
    return found, words


def main() -> None:
    """Run the command line."""
    found, words = check(map(Path, sys.argv[1:]) if sys.argv[1:] else DEFAULT)
    print(
        *found, f"{len(found) * 10_000 / max(words, 1):.1f} for 10,000 of {words} words", sep="\n"
    )


if __name__ == "__main__":
    main()
