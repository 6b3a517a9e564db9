"""The request for an export of a run, and the text by which the export is compared with the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate.scoring import read_sentences
from deepspeed_nmt.run.directory import Run, recorded_data


@dataclass(frozen=True)
class ExportRequest:
    """An export to make.

    Attributes:
        run: run directory.
        format: name of the format.
        precision: of the matrices.
        checkpoint: best, last, average, or a path.
        exit: exit of the model; None for the top.
        source: text to compare translations of; None for that of the run's data.
        reference: translations of the text; None without such, or for those of the run's data.
        sentences: number of sentences to compare; None: 1,000.
    """

    run: Path
    format: str
    precision: str
    checkpoint: str = "best"
    exit: str | None = None
    source: Path | None = None
    reference: Path | None = None
    sentences: int | None = None


@dataclass(frozen=True)
class ExportText:
    """Text to compare translations of.

    Attributes:
        lines: sentences, none without tokens, with the tag of the run's data.
        references: one of each; None without such.
        description: of its origin.
    """

    lines: list[str]
    references: list[str] | None
    description: str


def export_text(run: Run, request: ExportRequest, longest: int, most: int) -> ExportText:
    """Return the text to compare translations of: test set, validation set, then training set.

    Raises:
        ConfigError: if there is a reference without a source, or int8 without references.
        DataError: if there is no text.
    """
    if request.reference is not None and request.source is None:
        raise ConfigError("--reference needs --source, which is missing; give both")
    pairs: list[tuple[str, str]]
    parts: list[tuple[int, str]] = []  # of the data: number of the first pair, and name
    if request.source is not None:
        sources = read_sentences(str(request.source))
        references = read_sentences(str(request.reference)) if request.reference is not None else None
        if references is not None and len(references) != len(sources):
            raise DataError(
                f"--reference must have a line for each line of --source, but has {len(references):,} lines for "
                f"{len(sources):,}; give texts of the same sentences"
            )
        pairs = list(zip(sources, references or [""] * len(sources), strict=True))
        origin = str(request.source)
    else:
        try:
            data = recorded_data(run.path).main
        except DataError as error:
            raise DataError(
                f"the data of {run.path} must be there, because translations of it are compared, but is not; export "
                "with another text (`export --source F`), and give that export by `translate --export DIR`"
            ) from error
        pairs = []
        for split in ("test", "valid"):
            with suppress(DataError):
                files = [data.text(split, side) for side in ("source", "target")]
                found = list(zip(*(read_sentences(str(file)) for file in files), strict=True))
                parts.append((len(pairs), split))
                pairs += found
        if len(pairs) < most:
            corpus, tokenizer = data.corpus("train"), run.tokenizer
            parts.append((len(pairs), "train"))
            for index in range(min(len(corpus), most - len(pairs))):
                source, target = corpus.source(index).tolist(), corpus.target(index).tolist()
                texts = tokenizer.decode(source, "source"), tokenizer.decode(target, "target")
                pairs.append((run.tags.untagged(texts[0], "source"), run.tags.untagged(texts[1])))
        references, origin = [""], str(data.path)
    if references is None and request.precision != "fp32":
        raise ConfigError(f"--precision {request.precision} is judged by BLEU; add --reference to --source")
    encode = run.tokenizer.encode
    pairs = list(zip(run.tags.tagged([source for source, _ in pairs]), [each for _, each in pairs], strict=True))
    fits = [n for n, (source, _) in enumerate(pairs) if source.strip() and 0 < len(encode(source)) < longest][:most]
    if not fits:
        raise DataError(f"the text to compare translations of must have sentences, but {origin} has none")
    kept = [pairs[n] for n in fits]
    if parts:
        origin = f"{'+'.join(name for first, name in parts if first <= fits[-1])} of {origin}"
    return ExportText(
        [source for source, _ in kept],
        None if references is None else [run.tokenizer.reference(reference) for _, reference in kept],
        f"{len(kept):,} sentences: {origin}",
    )
