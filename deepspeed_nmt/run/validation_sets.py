"""Validation sets of a run, that of its training data and those that have names, and their translations on disk.

    RUN/validation/SET/source.txt, reference.txt       text of the set (main: that of the training data)
                       signatures.json                 signature of each metric, by name
                       update-0000400.txt              translations after update 400, one a line
                       update-0000400.NAME.sentences   scores of sentences by the program NAME, if it gives them
                       update-0000400.NAME.result      number of the late program NAME, which the program writes
                       update-0000400.NAME.log         output of the late program NAME
                       update-0000400.json             values of a validation that has late ones (main only)

All of it is plain text where that can be made, as metrics score it.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import ConfigError, DataError, shown
from deepspeed_nmt.evaluate.command_metrics import ScoredFiles, check_programs
from deepspeed_nmt.evaluate.metrics import Metric
from deepspeed_nmt.files import atomic_write_text, check_utf8_name, read_regular
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.directory import VALIDATION
from deepspeed_nmt.text import Kind, TextForm, tokenise
from deepspeed_nmt.train.configuration import MAIN, MAIN_DIRECTORY, ValidationConfig

SPLIT = "valid"


def given_sets(values: Sequence[str]) -> dict[str, str]:
    """Return the directories of validation sets by name, from NAME=DIR as ``train --valid`` takes it."""
    sets: dict[str, str] = {}
    for value in values:
        name, _, directory = value.partition("=")
        if not name or not directory:
            raise ConfigError(f"--valid is {shown(value)}; give NAME=DIR with a directory made by `prepare`")
        if name in sets:
            raise ConfigError(f"--valid has the name {name} twice; remove one")
        path = Path(directory).absolute()
        check_utf8_name(path, "--valid")
        sets[name] = str(path)
    return sets


def open_sets(config: ValidationConfig, data: DataDirectory) -> dict[str, DataDirectory]:
    """Open the data directories of all validation sets by name, first that of the training data."""
    sets, problems = {MAIN: data}, []
    for name, directory in config.sets.items():
        try:
            sets[name] = DataDirectory.open(Path(directory))
        except DataError as error:
            remedies = f"give its place by --valid {name}=DIR, or leave it out by validation.sets.{name}=null"
            problems.append(f"validation.sets.{name}: {error}; or {remedies}")
            continue
        if sets[name].vocabulary != data.vocabulary:
            problems.append(
                f"validation.sets.{name}: {directory} has another vocabulary than {data.path}; prepare its text with "
                f"--vocab-from {data.path}"
            )
    if problems:
        raise ConfigError(problems)
    return sets


def title(name: str) -> str:
    """Return the words for a validation set in messages."""
    return f"the validation set {name}" if name else "the validation set"


def digest(sets: Mapping[str, DataDirectory]) -> str:
    """Return a short hash of the names and the text of validation sets: scores of equal digests can be compared."""
    total = hashlib.sha256()
    for name, data in sorted(sets.items()):
        for file, record in sorted(data.meta.files.items()):
            if file.startswith(f"{SPLIT}."):
                total.update(f"{name} {file} {record.sha256}\n".encode())
    return total.hexdigest()[:8]


def check_commands(config: RunConfig, world: World) -> None:
    """Check that programs can be called, that other ranks wait for them, and that early stopping has a score."""
    commands, timeout_s = config.validation.commands, config.engine.timeout_s
    if world.is_main:
        check_programs(list(commands.values()))
    direct = any(not metric.late for metric in commands.values())
    if direct and world.ranks > 1 and config.validation.command_s >= timeout_s:
        raise ConfigError(
            f"validation.command_s is {config.validation.command_s:g}, but other ranks wait for "
            f"engine.timeout_s={timeout_s:g} only; lower the one, or raise the other"
        )
    best = commands.get(config.validation.best_measure)
    if best is not None and best.late and config.training.patience:
        raise ConfigError(
            f"training.patience is {config.training.patience}, but {best.name} chooses the best checkpoint, "
            "whose scores come late and are never read by training; use training.patience=0, or another "
            "validation.best_by"
        )


SAMPLES = 5
"""Sentences of each set whose translations TensorBoard shows."""
_ANY_FORM = TextForm()
_SAMPLE_WORDS = range(6, 26)
_FILE = re.compile(r"update-(\d{7,})\.(?:txt|json|[\w-]+\.(?:sentences|result|log))")
_MARKDOWN = re.compile(r"([\\`*_\[\]|])")


class ValidationTexts:
    """Translations of a validation set on disk. Only rank 0 has one.

    The ``keep`` newest ones are kept, 0 for all; ``form`` is that of the set's text.
    """

    def __init__(self, run: Path, name: str, keep: int = 0, form: TextForm = _ANY_FORM) -> None:
        self.directory = run / VALIDATION / (name or MAIN_DIRECTORY)
        self.sources: Sequence[str] = ()
        self.references: Sequence[str] = ()
        self._keep, self._form = keep, form

    def begin(
        self, sources: Sequence[str], references: Sequence[str], metrics: Sequence[Metric], update: int
    ) -> None:
        """Write source, reference and signatures; remove translations of other sentences and later updates."""
        self.sources, self.references = list(map(_one_line, sources)), list(map(_one_line, references))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.forget(update)
        texts = {"source.txt": _text(self.sources), "reference.txt": _text(self.references)}
        is_other = any(self._differs(name, text) for name, text in texts.items())
        if is_other and (updates := self._updates()):
            logger.warning(
                "%s: %d translations of other sentences than now are removed", self.directory, len(updates)
            )
            self.forget(-1)
        texts["signatures.json"] = json.dumps({metric.name: metric.signature() for metric in metrics}, indent=1)
        for name, text in texts.items():
            if self._differs(name, text):
                atomic_write_text(self.directory / name, text)

    def _differs(self, name: str, text: str) -> bool:
        with suppress(FileNotFoundError):
            return read_regular(self.directory / name) != text.encode()
        return True

    def forget(self, update: int) -> None:
        """Remove what belongs to later updates, which a resumed run makes again."""
        for path, number in self._files():
            if number > update:
                path.unlink(missing_ok=True)

    def write(self, update: int, translations: Sequence[str], besides: Collection[int]) -> None:
        """Write the translations after an update; remove old ones, but for those of the updates ``besides``."""
        atomic_write_text(self.path(update), _text(list(map(_one_line, translations))))
        if self._keep:
            kept = {*sorted(self._updates())[-self._keep :], *besides}
            for path, number in self._files():
                if number not in kept:
                    path.unlink(missing_ok=True)

    def read(self, update: int) -> list[str] | None:
        """Read the translations after an update; None if they are not there, or not those of these sentences."""
        try:
            lines = read_regular(self.path(update)).decode().removesuffix("\n").split("\n")
        except (OSError, ValueError):
            return None
        return lines if len(lines) == len(self.references) else None

    def converted(self, lines: Sequence[str], kind: Kind) -> list[str]:
        """Return lines as they are kept in the kind that a metric scores."""
        if kind == plain_kind(self._form) or self._form.target_lang is None:
            return list(lines)
        return list(tokenise(lines, self._form.target_lang))

    def path(self, update: int, suffix: str = "txt") -> Path:
        """Return the path of a file of an update."""
        return self.directory / f"update-{update:07d}.{suffix}"

    def scored(self, update: int, metric: str) -> ScoredFiles:
        """Return the files for a program."""
        source, reference = self.directory / "source.txt", self.directory / "reference.txt"
        return ScoredFiles(self.path(update), reference, source, self.path(update, f"{metric}.sentences"))

    def table(self, translations: Sequence[str]) -> str:
        """Return a table, in Markdown, of a few sentences: always the same ones, the first of common length."""
        usual = [number for number, line in enumerate(self.sources) if len(line.split()) in _SAMPLE_WORDS]
        chosen = [*usual, *(number for number in range(len(self.sources)) if number not in set(usual))][:SAMPLES]
        rows = [(self.sources[number], self.references[number], translations[number]) for number in sorted(chosen)]
        head = "| source | reference | translation |\n| --- | --- | --- |\n"
        return head + "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)

    def _files(self) -> list[tuple[Path, int]]:
        matches = ((path, _FILE.fullmatch(path.name)) for path in self.directory.glob("update-*"))
        return [(path, int(match[1])) for path, match in matches if match is not None]

    def _updates(self) -> set[int]:
        return {number for path, number in self._files() if path.suffix == ".txt"}


def plain_kind(form: TextForm) -> Kind:
    """Return the kind of text in which translations are written: plain if it can be made."""
    if form.problem("plain") or (form.form == "moses" and importlib.util.find_spec("sacremoses") is None):
        return "tokenised"
    return "plain"


def _one_line(text: str) -> str:
    return text.replace("\r", " ").replace("\n", " ")


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    """Return text that Markdown and HTML show as it is."""
    return _MARKDOWN.sub(r"\\\1", html.escape(text, quote=False))
