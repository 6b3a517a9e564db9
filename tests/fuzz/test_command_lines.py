"""Every command line ends with a documented status, and changes only what it names.

Command lines are drawn from the parsers of the commands.
"""

import argparse
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from deepspeed_nmt import cli
from deepspeed_nmt.cli import _parser
from deepspeed_nmt.commands import doctor
from deepspeed_nmt.parallel import shared_work
from deepspeed_nmt.recipes import recipes, sweeps
from tests.fuzz.configurations import words
from tests.fuzz.conftest import Explore
from tests.fuzz.program import run_program

FILES = ["text/train.en", "text/train.de", "text/valid.en", "text/valid.de", "text/test.en", "text/test.de"]
DIRECTORIES = ["run", "data", "text", "new", "empty"]
# fmt: off
STRANGE_PATHS = [
    "none", "none/none", "empty-file", "noise", "pipe", "/dev/null", "/dev/zero/x", "-", "", ".", "run/..", "x" * 256,
    "y" * 5000, "text/" + "z" * 256, "a/b/c/new", "new.png", "new.svg", "data/meta.json", "run/config.yaml",
    "run/checkpoints", "run/checkpoints/update-0000002", "loop", "dangling", "text/train.en/x", " ", "new.exe", "'",
    "run/", "./run", "data/../data", "\udcff", "a\x1b[31m", "--", "-x", "hf:none", "hf:", "hf:a,b,c", "*",
    "ü\u2028\n\t.txt",
]
"""Paths that are missing, of the wrong kind, or badly named; see `furnish`."""
NUMBERS = [
    "0", "1", "2", "3", "-1", "100", "1000", "0.5", "1e-9", "1e3", "1e400", "-0.0", "nan", "inf", "-inf", "x", "",
    " 1 ", "1_0", "0x10", "٣", "½", "1,2", str(2**31), str(2**63), str(10**12), "9" * 30, "9" * 5000, "-" + "9" * 30,
]
# fmt: on


@dataclass(frozen=True)
class Command:
    """A command, or one of its kinds, and its arguments."""

    words: tuple[str, ...]
    actions: Sequence[argparse.Action]


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[Command]:
    """A command, or the kinds of one that has several."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield Command(words, [action for action in parser._actions if not isinstance(action, argparse._HelpAction)])
    for action in nested:
        for name, below in action.choices.items():
            yield from commands(below, (*words, name))


def parser_of(name: str) -> argparse.ArgumentParser:
    (names,) = (action for action in _parser(name)._actions if isinstance(action, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = names.choices[name]
    return parser


COMMANDS = [command for name in cli.COMMANDS for command in commands(parser_of(name), (name,))]
SOUND = {
    ("sample-data",): "--out new --train 30 --valid 3 --test 3",
    ("prepare",): "--train-source text/train.en --train-target text/train.de --valid-source text/valid.en "
    "--valid-target text/valid.de --out new --vocab-size 400",
    ("train",): "--data data --run new",
    ("translate",): "--run run --input text/valid.en --output out.txt",
    ("score-pairs",): "--run run --source text/valid.en --target text/valid.de",
    ("score",): "--hypothesis text/valid.de --reference text/valid.de",
    ("average",): "--run run --last 1",
    ("plan",): "--recipe sample_small",
    ("report", "runs"): "run run",
    ("report", "depths"): "--run run --input text/valid.en --reference text/valid.de",
}
"""Arguments with which a command ends well. What follows can override them."""


def paths(action: argparse.Action) -> SearchStrategy[str]:
    """Paths, mostly of the kind that an option needs."""
    name = action.dest
    if action.metavar == "F":
        likely = ["out.txt", "out.png", "text/valid.en", "/dev/full"] if name in ("out", "output") else FILES
    elif name == "out":
        likely = ["new", "data", "empty"]
    elif name in ("run", "runs", "init_from", "grow_from"):
        likely = ["run", "run", "new"]
    else:
        likely = ["data", "run"] if name in ("data", "vocab_from", "like") else DIRECTORIES
    return _mostly(
        st.sampled_from(likely), st.sampled_from([*FILES, *DIRECTORIES, *STRANGE_PATHS]) | st.text(max_size=5)
    )


def values(action: argparse.Action) -> SearchStrategy[str]:
    """Values of an option, mostly sound ones."""
    if action.metavar == "key=value":
        return words().flatmap(st.sampled_from)
    if action.choices is not None:
        return _mostly(st.sampled_from(list(action.choices)), st.text(max_size=5))
    if action.type in (int, float):
        usual = ["0.5", "1.0"] if action.type is float else ["1", "2", "3", "400"]
        if action.dest == "repeat":  # 400 measurements take longer than a test may
            usual = usual[:2]
        return _mostly(
            st.sampled_from(usual + [str(action.default)] * (action.default is not None)), st.sampled_from(NUMBERS)
        )
    if action.type is Path or action.metavar == "F":
        return paths(action)
    if action.dest == "valid":
        return _mostly(
            st.sampled_from(["x=data", "news=data"]), st.sampled_from(["x", "=data", "loss=data", "x=text"])
        )
    told = [word.replace(":A", ":0.6") for word in re.findall(r"[\w:.,-]*\w", action.help or "")]
    named = {"recipe": recipes(), "sweep": sweeps(), "gpu": ["v100-32g", "x:1", "x:-1", "x:nan", "x:1e400"]}
    sound = named.get(action.dest, [*told, "400", "200,300"])
    return _mostly(st.sampled_from(sound), st.sampled_from(NUMBERS + STRANGE_PATHS) | st.text(max_size=8))


def _mostly(sound: SearchStrategy[str], strange: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.sampled_from([*[sound] * 9, strange]).flatmap(lambda chosen: chosen)


@st.composite
def arguments(draw: st.DrawFn, action: argparse.Action) -> list[str]:
    """An option with its values, or positional values."""
    option = [draw(st.sampled_from(list(action.option_strings)))] if action.option_strings else []
    if action.nargs == 0:
        return option
    several = action.nargs in ("+", "*")
    if action.dest in ("out", "output"):  # nobody reads from the pipe
        drawn = values(action).map(lambda value: value.replace("pipe", "new"))
    else:
        drawn = values(action)
    given = draw(st.lists(drawn, min_size=int(several), max_size=3)) if several else [draw(drawn)]
    if option and len(given) == 1 and draw(st.integers(0, 3)) == 0:
        return [f"{option[0]}={given[0]}"]
    return [*option, *given]


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command line: most of the required arguments, and some others, some of them twice."""
    command = draw(st.sampled_from(COMMANDS))
    sound = SOUND.get(command.words, "").split() if draw(st.integers(0, 3)) else []
    needed = [action for action in command.actions if action.required or not action.option_strings]
    chosen = [] if sound else [action for action in needed if draw(st.integers(0, 19))]
    chosen += draw(st.lists(st.sampled_from(command.actions), max_size=4))
    line = [*command.words, *sound, *(word for action in chosen for word in draw(arguments(action)))]
    if draw(st.integers(0, 19)) == 0:
        line.insert(
            draw(st.integers(0, len(line))), draw(st.sampled_from(["--help", "--version", "--", "-", "--x", "x"]))
        )
    return [word.replace("\0", "") for word in line]  # an argument of a process has none


SMALL = [
    "model={name: transformer, dim: 8, ffn_dim: 8, heads: 1, encoder_layers: 1, decoder_layers: 1}",
    *(
        "layer={name: standard}",
        "training.max_updates=1",
        "engine.device=cpu",
        "validation.max_sentences=2",
        "search={}",
    ),
]
"""Settings that end every training after an update, and with which a plan of 36 points takes no minute."""


def check_line(tiny: Path, place: Path, line: list[str]) -> None:
    """Run a command line in a directory that has data, a run, text, and files of all kinds."""
    furnish(tiny, place)
    is_long = any(word.partition("=")[0] in ("--sweep", "--probe") for word in line)
    last = SMALL if line[:1] == ["train"] or (line[:1] == ["plan"] and is_long) else []
    values = {part for word in line for part in (word, word.partition("=")[2])}
    may_change = [value for value in values if value and "\0" not in value]
    may_change += ["collapse.png", "depths.png", "runs.png", "sweep.png", "page.html"]
    may_change = [value if value != "loop" and value != "dangling" else "linked" for value in may_change]
    with _fed(place / "pipe", (tiny / "text/valid.en").read_bytes()):
        run_program([*line, *last], place, may_change, b"The dog sees a house.\n\n", "")


def furnish(tiny: Path, place: Path) -> None:
    """Fill a directory anew."""
    shutil.rmtree(place)
    shutil.copytree(tiny, place, symlinks=True)
    (place / "empty").mkdir()
    (place / "empty-file").touch()
    (place / "noise").write_bytes(bytes(range(256)) * 9)
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("linked")
    os.mkfifo(place / "pipe")


@contextmanager
def _fed(pipe: Path, content: bytes) -> Iterator[None]:
    """Write to a pipe once if the block opens it."""
    done = threading.Event()

    def feed() -> None:
        while not done.wait(0.002):
            try:
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads
                continue
            with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            return

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`selftest` and `doctor` check their options, and start nothing."""
    monkeypatch.setattr(doctor, "_examine", lambda arguments: 0)
    monkeypatch.setattr(shared_work, "run_workers", lambda *arguments: 0)


def test_command_lines(tiny: Path, place: Path, explore: Explore) -> None:
    explore(lambda line: check_line(tiny, place, line), lines(), 60, 780.0)
