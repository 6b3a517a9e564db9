"""Options of `translate` that choose the program that translates."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deepspeed_nmt.export.certificate import Certificate
    from deepspeed_nmt.search.base import Translation


class AnyTranslator(Protocol):
    """A translator of either program; see ``deepspeed_nmt.api.Translator``."""

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long."""
        ...

    def stream(
        self,
        sentences: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        nbest: int = 1,
        advance: Callable[[int], object] = ...,
        max_source_tokens: int | None = None,
        strict: bool = False,
    ) -> Iterator[list[Translation]]:
        """Yield the best translations of each sentence."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--runtime", choices=("torch", "ctranslate2"), default="torch",
        help="program that translates; ctranslate2: with an export of the run, which the first use makes and "
        "compares with the run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("float32", "int8"),
        help="with --runtime ctranslate2: precision of the matrices (default: float32)",
    )  # fmt: skip


def opener(arguments: argparse.Namespace) -> Callable[..., AnyTranslator]:
    """Return the function that opens a translator, with the arguments of ``Translator.open``.

    Args:
        arguments: of the command line.

    Raises:
        ConfigError: if a precision is given that the program does not have.
    """
    if arguments.runtime == "ctranslate2":
        return partial(_open_exported, precision=arguments.precision or "float32")
    if arguments.precision is not None:
        raise ConfigError("--precision needs --runtime ctranslate2, but the runtime is torch; give both, or neither")
    from deepspeed_nmt.api import Translator

    return Translator.open


def _open_exported(
    runs: Sequence[Path],
    *,
    precision: str,
    checkpoint: str,
    device: str,
    exit: str | None,
    encoder_layers: int | None,
    decoder_layers: int | None,
    detokenise: str | None,
    name: str | None,
    **changes: Any,
) -> AnyTranslator:
    """Export a run if it has no current export, and open that.

    Raises:
        ConfigError: if CTranslate2 does not have what the options ask for.
    """
    from deepspeed_nmt.export.runtime import ExportedTranslator, ensure, place_of

    if len(runs) > 1:
        raise ConfigError(f"--runtime ctranslate2 takes one --run, but {len(runs)} are given; give one")
    if name is not None:
        raise ConfigError("--runtime ctranslate2 decodes with one net, --rerank with two; give one of them")
    if (encoder_layers is None) != (decoder_layers is None):
        raise ConfigError(
            "--runtime ctranslate2 needs both --encoder-layers and --decoder-layers, or --exit N-M; give the other"
        )
    exit = f"{encoder_layers}-{decoder_layers}" if encoder_layers is not None else exit
    run = runs[0]
    if not run.is_dir():
        raise ConfigError(f"--run must be a directory made by `train`, but {run} does not exist")
    place = place_of(run, checkpoint, exit, precision)

    def make(out: Path) -> Certificate:
        from deepspeed_nmt.run.exporting import ExportRequest, export_run  # imports torch

        return export_run(ExportRequest(run, "ctranslate2", precision, checkpoint, exit), out, overwrite=True)

    def is_current(certificate: Certificate) -> bool:
        from deepspeed_nmt.run.exporting import is_current  # imports torch

        return is_current(certificate, run, checkpoint)

    ensure(place, run, checkpoint, make, is_current)
    return ExportedTranslator(place, device, changes, detokenise)
