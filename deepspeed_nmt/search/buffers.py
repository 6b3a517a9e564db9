"""Translation of a stream of lines, a buffer at a time, by whatever program. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.source_lines import SourceLines

Line = TypeVar("Line")
Found = tuple[int, list[Translation]]
"""A sentence, by its number among those that were asked for, and its translations, best first."""


class BatchSearch(Protocol[Line]):
    """A program that translates the sentences of a buffer, batch by batch."""

    def __call__(self, lines: list[Line], sources: list[list[int]], /) -> Iterable[list[Found]]:
        """Yield the sentences of each batch.

        Args:
            lines: sentences that have tokens.
            sources: their tokens, without EOS.
        """
        ...


def translated(
    read: Callable[[int], Sequence[Line]],
    encode: Callable[[Sequence[Line]], list[list[int]]],
    search: BatchSearch[Line],
    reader: SourceLines,
    nothing: Translation,
    max_tokens: int,
    buffer_lines: int,
    advance: Callable[[int], object],
) -> Iterator[list[Translation]]:
    """Yield the translations of lines in their order, and log warnings of the lines.

    Args:
        read: returns at most as many further lines; none at the end.
        encode: returns the tokens of lines, by ``reader``.
        search: translates.
        reader: of the lines.
        nothing: translation of a line without tokens.
        max_tokens: bound of a batch: sentences times the longest source, in tokens with EOS.
        buffer_lines: lines that are read before the first of them is yielded.
        advance: called with the number of further lines that are done.
    """
    before = 0
    while buffer := read(buffer_lines):
        sources = encode(buffer)
        reader.warn_of_unknown()
        translations = [[nothing] for _ in buffer]
        filled = [number for number, source in enumerate(sources) if source]
        advance(len(buffer) - len(filled))
        for number in filled:
            if (length := len(sources[number]) + 1) > max_tokens:
                reader.note_batch(before + number + 1, length, max_tokens)
        for batch in search([buffer[number] for number in filled], [sources[number] for number in filled]):
            for place, best in batch:
                translations[filled[place]] = best
            advance(len(batch))
        yield from translations
        before += len(buffer)
    reader.warn_at_end()


def check_numbers(numbers: Mapping[str, object], nbest: int, search: SearchConfig) -> None:
    """Check the numbers of a translation.

    Args:
        numbers: by name; each must be a whole number of at least 1.
        nbest: translations of each line that are wanted; one of the numbers.
        search: the search.

    Raises:
        ConfigError: naming all that are out of range.
    """
    problems = out_of_bounds(numbers)
    if isinstance(nbest, int) and nbest > search.width:
        problems.append(_too_many(nbest, search))
    if problems:
        raise ConfigError(problems)


def out_of_bounds(numbers: Mapping[str, object]) -> list[str]:
    """Return one sentence for each option that is not a whole number of at least 1."""
    return [
        f"{option(name)} must be a whole number of at least 1, but is {shown(value)}"
        for name, value in numbers.items()
        if not isinstance(value, int) or value < 1
    ]


def _too_many(nbest: int, config: SearchConfig) -> str:
    """Return the message that a search does not keep ``nbest`` translations."""
    if config.width_setting is None:
        return f"{option('nbest')} must be 1 with search.name={config.name}, but is {nbest}; use another search"
    width = option(config.width_setting)
    bound = width if config.lists == 1 else f"{config.lists} x {width}"
    return (
        f"{option('nbest')} must be at most {bound}, which is {config.width}, but is {nbest}; "
        f"raise {width} to {-(-nbest // config.lists)}"
    )
