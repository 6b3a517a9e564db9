"""Options of `prepare` about the cleaning of training text, and its report about what was removed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_nmt.data.clean import CleaningConfig
    from deepspeed_nmt.data.directory import Meta

FILTER_NAMES = (
    *("html", "url", "long_words", "letters", "copy", "digits", "punctuation", "repetition", "script", "language"),
    *("score", "near_duplicates"),
)
"""Names of :data:`deepspeed_nmt.data.filters.FILTERS`, which is not imported for the help."""
UNICODE_NAMES = ("drop_control", "drop_zero_width", "drop_bidi", "nfc")
"""Names of :data:`deepspeed_nmt.data.unicode_rules.UNICODE_RULES`."""
_SIDE_SHOWN = 50


def add_cleaning_options(parser: argparse._ActionsContainer) -> None:
    """Declare the options of cleaning."""
    parser.add_argument(
        "--max-length", type=int, default=250, metavar="N", help="longest sentence, in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--max-ratio", type=float, default=3.0, metavar="R",
        help="largest ratio of the two sides' lengths, in tokens of the vocabulary (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ratio-from", type=int, default=10, metavar="N",
        help="check the ratio only if a side has more than N tokens; 1: always (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--keep-duplicates", action="store_true", help="keep duplicate pairs")
    parser.add_argument(
        "--remove-identical", action="store_true", help="remove pairs whose source and target are equal"
    )
    parser.add_argument(
        "--filters", default="", metavar="NAME[=VALUE],...",
        help="remove more training pairs: web, which stands for many filters, or names of filters "
        f"({', '.join(FILTER_NAMES)}), with a value to set their bound; -NAME leaves out a filter of web",
    )  # fmt: skip
    parser.add_argument(
        "--unicode", default="", metavar="RULE,...",
        help=f"repair characters of the training text before it is cleaned: {', '.join(UNICODE_NAMES)}",
    )  # fmt: skip


def removals(meta: Meta, cleaning: CleaningConfig) -> list[str]:
    """Return the lines of the report with the pairs removed, by reason."""
    from deepspeed_nmt.data.clean import describe
    from deepspeed_nmt.data.filters import read_filters

    filters = read_filters(meta.options.get("filters", {}))
    lines = []
    for reason, count in meta.removed.items():
        if count:
            label = f"  removed: {describe(reason, cleaning, filters)}"
            lines.append(f"{label:<62}{count:>14,}{count / meta.pairs_read:>8.2%}")
    return lines


def repairs(meta: Meta) -> list[str]:
    """Return the lines of the report with the lines of text that Unicode rules changed; none without such rules."""
    if not meta.repaired:
        return []
    header = f"{'lines repaired':<16}{'source':>12}{'target':>16}"
    return [
        "",
        header,
        *(f"{rule:<16}{each['source']:>12,}{each['target']:>16,}" for rule, each in meta.repaired.items()),
    ]


def removed_examples(meta: Meta) -> list[str]:
    """Return the lines of the report with removed pairs; none if no examples are recorded."""
    lines = [
        f"  {reason:<16}{_excerpt(source):<{_SIDE_SHOWN}}  |  {_excerpt(target)}"
        for reason, examples in meta.removed_examples.items()
        for source, target in examples
    ]
    return ["", "removed, for example", *lines] if lines else []


def _excerpt(text: str) -> str:
    return text if len(text) <= _SIDE_SHOWN else f"{text[: _SIDE_SHOWN - 3]}..."
