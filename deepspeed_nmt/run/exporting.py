"""Export of a run: a model of a checkpoint in another program's format, compared with the run.

Legend: B sentences (here 1), C extensions, K beam.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

import deepspeed_nmt
from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.errors import ConfigError, DataError, check_installed
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.evaluate.scoring import read_sentences
from deepspeed_nmt.export.certificate import (
    AT_LIMIT,
    CERTIFICATE_FILE,
    LEFT_OUT,
    SENTENCES,
    Certificate,
    Comparison,
    Difference,
    ExportInfo,
)
from deepspeed_nmt.export.ctranslate2_search import RULES, ExportBeamSettings
from deepspeed_nmt.export.ctranslate2_weights import CTranslate2Format
from deepspeed_nmt.export.formats import Format, OwnProgram, Sentences, Subject
from deepspeed_nmt.export.huggingface_weights import HuggingFaceFormat
from deepspeed_nmt.files import check_utf8_name, replacing, staged
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.planning.counting import sizes
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.opening import cut_at
from deepspeed_nmt.run.start import recorded_data
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch, BeamSentence
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.left_to_right import Live, largest
from deepspeed_nmt.train.checkpoint import Checkpoint

FORMATS: Mapping[str, type[Format]] = {format.name: format for format in (CTranslate2Format, HuggingFaceFormat)}
"""All formats by name."""
BEAMS = (1, 5)
"""Beam sizes of a certificate."""
_LEAST_TOLERANCE = 1e-4
"""Margin (nats) of a near-tie, at least; sums of log-probabilities differ by some 1e-5 between programs in fp32."""
_LARGEST_TOLERANCE = 1e-2
"""Bound of that margin in fp32."""
_LARGEST_LOGIT_DIFFERENCE = 1e-3
"""Largest difference (nats) of a token's log-probability in fp32."""
_SCORED = 50
"""Translations whose tokens' log-probabilities are compared."""


@dataclass(frozen=True)
class ExportRequest:
    """An export to make; its fields are the options of `export`."""

    run: Path
    format: str
    precision: str
    checkpoint: str = "best"
    exit: str | None = None
    source: Path | None = None
    reference: Path | None = None
    sentences: int | None = None


class ExportText(NamedTuple):
    """Text to compare translations of: tagged sentences with tokens, a reference of each or None, and its origin."""

    lines: list[str]
    references: list[str] | None
    description: str


def export_run(
    request: ExportRequest, out: Path, overwrite: bool, check: Callable[[ExportInfo], object] = lambda info: None
) -> Certificate:
    """Export a run into a directory, compare translations, and write the certificate there.

    ``check`` refuses a run by what the export will say of it, before anything is written. After any error an older
    export is unchanged.
    """
    format = FORMATS[request.format]
    check_utf8_name(out, "--out")
    if is_export(out) and not overwrite:
        raise ConfigError(f"{out} has an export; add --overwrite to replace it")
    Certificate.check_own(out)
    run = Run.open(request.run)
    if not run.config.model.left_to_right:
        raise ConfigError(
            f"{run.path} predicts masked tokens, and only runs that translate from left to right are exported"
        )
    exit = TOP if request.exit is None else request.exit
    checkpoint = run.checkpoint(request.checkpoint)
    # A training of the run may save another best or last one meanwhile.
    which = str(checkpoint.path)
    then = run.at(which)
    empty = cut_at(run, build_meta_model(then.config, run.tokenizer.vocabulary), exit)
    try:
        format.check(empty)
    except NotStandardError as error:
        raise ConfigError(f"{run.path} cannot be exported as {format.name}: {error}") from error
    check_installed(format.package, f"--format {format.name}", format.install)
    info = _info(then, request, empty)
    check(info)
    if lacking := [f"search.{name}={value}" for name, value in info.left_out.items()]:
        logger.warning(
            "the export of %s is compared by beam search without %s, which other programs lack",
            run.path,
            " and ".join(lacking),
        )
    settings, longest = info.search, info.longest
    text = export_text(run, request, longest, request.sentences or SENTENCES)
    scorer = None if text.references is None else run.scorer(text.references, run.data.text)
    cut = run.model(which).at_exit(exit).eval()

    dropouts = {name: value for name, value in then.config.model.model_dump().items() if name.endswith("dropout")}
    subject = Subject(cut, run.tokenizer, longest, request.precision, run.data.tags, dropouts)
    with replacing(out, is_export), staged(out, partial(Certificate.check_own, out)) as new:
        format.write(new, subject)
        run.tokenizer.save(new)
        shutil.copyfile(run.path / "config.yaml", new / "run.yaml")
        info.write(new)
        records = {file.name: FileRecord.of(file) for file in sorted(new.iterdir()) if file.is_file()}
        program = format(new, subject)
        comparisons, difference = _compare(subject, program, settings, text, scorer)
        problems = [problem for comparison in comparisons for problem in comparison.problems(request.precision)]
        if request.precision == "fp32" and not difference <= _LARGEST_LOGIT_DIFFERENCE:
            problems.append(
                f"log-probabilities of tokens differ by {difference:.1e}, more than {_LARGEST_LOGIT_DIFFERENCE:g}"
            )
        certificate = Certificate(
            exporter=format.name,
            precision=request.precision,
            versions={
                "deepspeed_nmt": deepspeed_nmt.__version__,
                **{name: importlib.metadata.version(name) for name in ("torch", format.package)},
            },
            run=str(run.path.resolve()),
            checkpoint=request.checkpoint,
            exit=request.exit or "",
            update=checkpoint.progress.update,
            hashes={
                **_hashes(run, checkpoint),
                "text": hashlib.sha256("\n".join(text.lines).encode()).hexdigest(),
            },
            text=text.description,
            metric="" if scorer is None else scorer.metrics[0].name,
            signature="" if scorer is None else scorer.metrics[0].signature(),
            length_penalty=format.length_penalty or settings.length_penalty,
            logit_difference=difference if math.isfinite(difference) else None,
            comparisons=comparisons,
            weights_bytes=4 * sum(sizes(cut)),
            export_bytes=sum(record.bytes for record in records.values()),
            files=records,
            problems=tuple(problems),
        )
        certificate.write(new)
    return certificate


def export_text(run: Run, request: ExportRequest, longest: int, most: int) -> ExportText:
    """Return the text to compare translations of: test set, validation set, then training set."""
    has_references = request.source is None or request.reference is not None
    if request.reference is not None and request.source is None:
        raise ConfigError("--reference is given without --source; give both")
    if not has_references and request.precision != "fp32":
        raise ConfigError(f"no --reference, by which --precision {request.precision} is judged; add it to --source")
    if request.source is None:
        pairs, origin = _own_pairs(run, most)
    else:
        origin = str(request.source)
        sources = read_sentences(origin)
        references = [""] * len(sources) if request.reference is None else read_sentences(str(request.reference))
        if len(references) != len(sources):
            raise DataError(
                f"--reference has {len(references):,} lines and --source {len(sources):,}; give texts of the same "
                "sentences"
            )
        pairs = [(source, reference, "") for source, reference in zip(sources, references, strict=True)]
    tagged = run.data.tags.tagged([source for source, _, _ in pairs])
    encode = run.tokenizer.encode
    kept = [
        (line, reference, part)
        for line, (_, reference, part) in zip(tagged, pairs, strict=True)
        if line.strip() and 0 < len(encode(line)) < longest
    ][:most]
    if not kept:
        raise DataError(f"{origin} has no sentences to compare translations of")
    parts = "+".join(part for part in dict.fromkeys(part for _, _, part in kept) if part)
    return ExportText(
        [line for line, _, _ in kept],
        [reference for _, reference, _ in kept] if has_references else None,
        f"{len(kept):,} sentences: {f'{parts} of ' if parts else ''}{origin}",
    )


def _own_pairs(run: Run, most: int) -> tuple[list[tuple[str, str, str]], str]:
    """Return sources, targets and splits of a run's data, and its path."""
    try:
        data = recorded_data(run.path).main
        run.check_vocabulary(data)
    except DataError as error:
        raise DataError(
            f"no data of {run.path}, by which translations are compared; export with another text (`export "
            "--source F`), and give that export by `translate --export DIR`"
        ) from error
    pairs: list[tuple[str, str, str]] = []
    for split in ("test", "valid"):
        with suppress(DataError):
            sources, targets = (read_sentences(str(data.text(split, side))) for side in ("source", "target"))
            pairs += [(source, target, split) for source, target in zip(sources, targets, strict=True)]
    if len(pairs) < most:
        corpus, tokenizer = data.corpus("train"), run.tokenizer
        # The words that segments make are unknown to a vocabulary of segments.
        spell = (lambda *line: " ".join(tokenizer.pieces(*line))) if tokenizer.segmented else tokenizer.decode
        for index in range(min(len(corpus), most - len(pairs))):
            source = spell(corpus.source(index).tolist(), "source")
            target = tokenizer.decode(corpus.target(index).tolist())
            pairs.append((run.data.tags.untagged(source, "source"), run.data.tags.untagged(target), "train"))
    return pairs, str(data.path)


def is_export(path: Path) -> bool:
    """Return True if a directory is an export that was written in full."""
    return (path / CERTIFICATE_FILE).is_file()


def settings_of(run: Run) -> ExportBeamSettings:
    """Return the settings of a beam search with the run; those that its own search lacks have their defaults."""
    settings = {**BeamConfig().model_dump(), **run.config.search.model_dump(), "name": "beam"}
    return ExportBeamSettings(**{key: settings[key] for key in ExportBeamSettings.model_fields})


def rules_of(run: Run) -> dict[str, Any]:
    """Return the rules of the next token that the run's search has, and that other programs lack."""
    search = run.config.search
    return {name: value for name, none in RULES.items() if (value := getattr(search, name, none)) != none}


def _info(run: Run, request: ExportRequest, model: TranslationModel) -> ExportInfo:
    """Describe the export of a run, whose model at the exit has no weights yet."""
    search, settings = run.config.search, settings_of(run)
    source = int(min(run.longest_line, (model.longest_source or math.inf) - 1)) + 1
    # Positions of the longest source or translation, rounded up.
    target = int(settings.max_length_ratio * source) + settings.max_length_extra
    longest = 1 << math.ceil(math.log2(max(source, target) + 1))
    return ExportInfo(
        exporter=request.format,
        precision=request.precision,
        longest=longest,
        longest_line=source - 1,
        search_name=(search if request.exit is None else search.from_one_exit()).name,
        search=settings,
        rules=rules_of(run),
        text=run.data.common_text,
        tags=run.data.tags,
        model={**run.config.model.model_dump(mode="json"), "exit": request.exit or TOP},
    )


def _compare(
    subject: Subject, program: Format, settings: ExportBeamSettings, text: ExportText, scorer: Scorer | None
) -> tuple[tuple[Comparison, ...], float]:
    """Return a comparison for each beam size, and the largest difference (nats) of a token's log-probability."""
    sources = [subject.tokenizer.encode(line) for line in text.lines]
    programs = OwnProgram(subject.model, subject.tokenizer.vocabulary), program
    comparisons: list[Comparison] = []
    logit_difference = 0.0
    for beam in BEAMS:
        changes = {"beam": beam, "length_penalty": program.length_penalty or settings.length_penalty}
        chosen = settings.model_copy(update=changes)
        logger.info("certificate, beam %d: %d sentences are translated by both programs", beam, len(sources))
        both, seconds = [], []
        for one in programs:
            one.translate(sources[:2], chosen)  # the first batch has start-up costs
            start = time.perf_counter()
            both.append(one.translate(sources, chosen))
            seconds.append(time.perf_counter() - start)
        if beam == BEAMS[0]:
            logit_difference = _logit_difference(*programs, sources, both[0])
        pairs = list(zip(*both, strict=True))
        identical = [(own, other) for own, other in pairs if own.tokens == other.tokens]
        # A score is NaN if the other program gives none.
        score_gaps = [gap for own, other in identical if not math.isnan(gap := abs(own.score - other.score))]
        gaps = [gap for own, other in identical if not math.isnan(gap := abs(own.log_prob - other.log_prob))]
        tolerance = max(_LEAST_TOLERANCE, 2.0 * logit_difference, 2.0 * max([*score_gaps, *gaps], default=0.0))
        if subject.precision == "fp32":  # a wrong export must not excuse its differences
            tolerance = min(tolerance, _LARGEST_TOLERANCE)
        texts = [[subject.tags.untagged(subject.tokenizer.decode(best.tokens)) for best in bests] for bests in both]
        differences = []
        for number, (source, (own, other), here, there) in enumerate(zip(sources, pairs, *texts, strict=True), 1):
            if own.tokens != other.tokens:
                margin, kind = reason_of(subject, source, own, other, chosen)
                explained = margin is None or margin <= tolerance
                differences.append(
                    Difference(line=number, here=here, there=there, margin=margin, kind=kind, explained=explained)
                )
        bleu = [None if scorer is None else scorer.first(translations) for translations in texts]
        comparisons.append(
            Comparison(
                beam=beam,
                sentences=len(sources),
                identical=len(identical),
                score_difference=max(score_gaps, default=None),
                tolerance=tolerance,
                differences=tuple(differences),
                bleu_here=bleu[0],
                bleu_there=bleu[1],
                seconds_here=seconds[0],
                seconds_there=seconds[1],
            )
        )
    return tuple(comparisons), logit_difference


def _logit_difference(here: OwnProgram, program: Format, sources: Sentences, own: Sequence[Hypothesis]) -> float:
    some = range(0, len(sources), max(1, len(sources) // _SCORED))
    pairs = [sources[number] for number in some], [own[number].tokens for number in some]
    both = zip(here.token_log_probs(*pairs), program.token_log_probs(*pairs), strict=True)
    differences = [abs(one - other) for ours, theirs in both for one, other in zip(ours, theirs, strict=True)]
    return float(torch.tensor(differences).max())  # NaN if one is


def is_current(certificate: Certificate, path: Path, checkpoint: str) -> bool:
    """Return True if a certificate is of the settings, the vocabulary and the weights that a run has now."""
    run = Run.open(path)
    return _hashes(run, run.checkpoint(checkpoint)).items() <= certificate.hashes.items()


def _hashes(run: Run, checkpoint: Checkpoint) -> dict[str, str]:
    return {
        "config.yaml": run.files["config.yaml"].sha256,
        "vocabulary": run.tokenizer.digest,
        "weights": checkpoint.weights_digest,
    }


class _TracedSearch(BeamSearch):
    """Beam search by torch that records the smallest margin by which it preferred a hypothesis to another."""

    smallest = math.inf

    @override
    def extended(self, live: Live[BeamSentence], logits_RV: Tensor) -> Tensor:
        total_RV = super().extended(live, logits_RV)
        if live.sentences[0].limit > live.length:
            log_probs, index = (x_BC[0] for x_BC in largest(total_RV.view(1, -1), total_RV.shape[1], 2 * self.beam))
            ends, beam = index % total_RV.shape[1] == self.vocabulary.eos, self.beam
            opened = log_probs[~ends]
            pairs = [(opened[beam - 1], opened[beam])] if len(opened) > beam else []
            if len(log_probs) > beam and bool(ends[beam - 1]) != bool(ends[beam]):
                pairs.append((log_probs[beam - 1], log_probs[beam]))
            gaps = [float(better - worse) for better, worse in pairs if bool(worse.isfinite())]
            self.smallest = min([self.smallest, *gaps])
        return total_RV


@torch.inference_mode()
def reason_of(
    subject: Subject, source: Sequence[int], own: Hypothesis, other: Hypothesis, settings: ExportBeamSettings
) -> tuple[float | None, str]:
    """Return the smallest margin (nats) by which the search preferred `own` to `other`, and its kind.

    There is no margin if another rule explains the difference: the length limit, or the length penalty of a program
    that keeps the K finished hypotheses that are best by the power of the length, as CTranslate2 does.
    """
    limit = settings.limit(len(source) + 1, subject.longest)
    if any(len(best.tokens) + 1 >= limit for best in (own, other)):
        return None, AT_LIMIT
    penalty = LengthPenalty.parse(settings.length_penalty)
    powers = [best.log_prob / (len(best.tokens) + 1) ** penalty.exponent for best in (own, other)]
    if settings.beam > 1 and penalty.family != "power" and powers[0] < powers[1]:
        return None, LEFT_OUT
    model, vocabulary = subject.model, subject.tokenizer.vocabulary
    source_BS: Tensor = torch.tensor([[*source, vocabulary.source.eos]])
    scored = token_log_probs(model, vocabulary, source_BS, False, [[own.tokens, other.tokens]])[0]
    scores = [math.fsum(log_probs) / penalty(len(log_probs)) for log_probs in scored]
    margins = {"the two translations": abs(scores[0] - scores[1])}
    ended = ([*own.tokens, vocabulary.eos], [*other.tokens, vocabulary.eos])
    at = next(place for place, (one, two) in enumerate(zip(*ended, strict=False)) if one != two)
    margins["their first different tokens"] = abs(scored[0][at] - scored[1][at])
    if settings.beam > 1:
        search = _TracedSearch(BeamConfig(**settings.model_dump()), model, vocabulary)
        search.search(source_BS, False)
        margins["hypotheses of the beam"] = search.smallest
    kind = min(margins, key=lambda name: margins[name])
    return margins[kind], kind
