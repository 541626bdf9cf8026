"""Text that is safe to print in a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return one line of text with control characters escaped, such as ``\x1b`` and ``\n``.

    File names and text from files may contain escape sequences that control the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
