"""Warning of a source text in another form than the training text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deepspeed_nmt.console import logger
from deepspeed_nmt.text import TextForm, looks_plain, looks_tokenised

LINES_OF_A_FORM = 100
"""Lines that show the form of a text."""


def warn_of_form(lines: Iterable[str], text: TextForm) -> Iterator[str]:
    """Yield the lines of a source text, and warn if the first of them are not in the form of the training text.

    Args:
        lines: the text.
        text: form of the training text.
    """
    first: list[str] | None = []
    for line in lines:
        yield line
        if first is not None:
            first.append(line.rstrip())
            if len(first) == LINES_OF_A_FORM:
                _warn_of_form(first, text)
                first = None
    if first:
        _warn_of_form(first, text)


def _warn_of_form(lines: Sequence[str], text: TextForm) -> None:
    if text.form == "raw" and (count := looks_tokenised(lines)):
        look, trained, remedy = "end in ' .' and look tokenised", "raw text", "give plain text"
    elif text.form in ("moses", "tokenised") and (count := looks_plain(lines)):
        look, trained = "end in a word with its stop and look like plain text", "tokenised text"
        remedy = "tokenise it as the training text was"
        if text.form == "moses":
            remedy += f", for example by `sacremoses -l {text.source_lang or 'LANGUAGE'} tokenize`"
    else:
        return
    logger.warning(
        "%s of the first %s lines %s, but the run was trained on %s; %s", count, len(lines), look, trained, remedy
    )
