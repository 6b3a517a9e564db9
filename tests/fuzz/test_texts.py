"""No text loses a line, and all output is UTF-8."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from deepspeed_nmt.data.directory import DataDirectory
from tests.fuzz.exploring import explore, explore_for
from tests.fuzz.program import Outcome, run_program
from tests.fuzz.texts import ENDS, count, joined, pairs

Ends = tuple[bytes, bool, bytes]


def clear(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def check_prepare(tiny: Path, place: Path, case: tuple[Any, Ends, str]) -> None:
    """Prepare text, and compare the counts with those of the lines."""
    clear(place)
    (train, valid, test), ends, options = case
    words = ["prepare", "--out", "data", *options.format(tiny / "data").split()]
    for split, content in (("train", train), ("valid", valid), ("test", test)):
        for side, name in enumerate(("source", "target")):
            (place / f"{split}.{name}").write_bytes(joined([pair[side] for pair in content], ends))
            words += [f"--{split}-{name}", f"{split}.{name}"]
    # Sound text first, so that a vocabulary can be made.
    for name, ending in (("source", "en"), ("target", "de")):
        shutil.copy(tiny / "text" / f"train.{ending}", place / f"sound.{name}")
        words.insert(words.index(f"--train-{name}") + 1, f"sound.{name}")
    outcome = run_program(words, place, ["data"])
    read = 200 + max(count((place / f"train.{name}").read_bytes()) for name in ("source", "target"))
    if outcome.status == 0:
        meta = DataDirectory.open(place / "data").meta
        assert meta.pairs_read == read
        assert meta.splits["train"].pairs + sum(meta.removed.values()) == read
        for split in ("valid", "test"):
            for name in ("source", "target"):
                content = (place / f"{split}.{name}").read_bytes().removeprefix(b"\xef\xbb\xbf")
                assert (place / f"data/{split}.{name}").read_bytes() == content
        assert meta.splits["valid"].pairs == count((place / "valid.source").read_bytes())
    else:
        assert not (place / "data").exists()


def check_translation(tiny: Path, place: Path, case: tuple[list[bytes], Ends, list[str], bool]) -> None:
    """Translate text, and compare the number of lines."""
    clear(place)
    content, ends, options, piped = case
    text = joined(content, ends)
    (place / "in").write_bytes(text)
    names = ["--input", "-", "--output", "-"] if piped else ["--input", "in", "--output", "out"]
    words = ["translate", "--run", str(tiny / "run"), *names, *options]
    outcome = run_program(words, place, ["out"], text, repr(text))
    if outcome.status != 0:
        return
    output = outcome.out if piped else (place / "out").read_bytes()
    lines = output.decode().split("\n")
    assert lines.pop() == ""
    if "--nbest" in options:
        numbers = [int(line.split(" ||| ")[0]) for line in lines]
        assert sorted(set(numbers)) == list(range(count(text))) and numbers == sorted(numbers)
    else:
        assert len(lines) == count(text), repr(text)
        assert not any(new for old, new in zip(content, lines, strict=False) if not old), repr(text)


def check_score(place: Path, case: tuple[list[tuple[bytes, bytes]], Ends, list[str]]) -> None:
    """Score text against other text and against itself."""
    clear(place)
    content, ends, options = case
    for side, name in enumerate(("a", "b")):
        (place / name).write_bytes(joined([pair[side] for pair in content], ends))
    words = ["score", "--hypothesis", "a", "b", "--reference", "b", "--source", "a", "--json", *options]
    for row in scores(run_program(words, place, named=repr(content))):
        scored = [row[name]["score"] for name in ("bleu", "chrf", "tokenised_bleu") if name in row]
        assert scored and all(0.0 <= score <= 100.001 for score in scored), row


def scores(outcome: Outcome) -> list[dict[str, Any]]:
    """Rows of scores as strict JSON."""
    if outcome.status != 0:
        return []
    return [json.loads(line, parse_constant=pytest.fail) for line in outcome.out.decode().split("\n")[:-1]]


def check_report(tiny: Path, place: Path, case: tuple[list[tuple[bytes, bytes]], Ends, list[str]]) -> None:
    """Compare the depths of the run on random text."""
    clear(place)
    content, ends, options = case
    for side, name in enumerate(("a", "b")):
        (place / name).write_bytes(joined([pair[side] for pair in content], ends))
    words = ["report", "depths", "--run", str(tiny / "run"), "--input", "a", "--reference", "b", "--json", *options]
    scores(run_program(words, place, ["depths.png"], named=repr(content)))


def prepared() -> st.SearchStrategy[tuple[Any, Ends, str]]:
    options = [
        "--vocab-from {}",
        "--vocab-from {}",
        "--vocab-size 400",
        "--segmented",
        "--normalization nfc --vocab-size 400",
        "--vocab-from {} --filters web,script=Latin/Latin --unicode nfc,drop_control,drop_zero_width,drop_bidi",
    ]
    return st.tuples(st.tuples(pairs(), pairs(), pairs()), ENDS, st.sampled_from(options))


def translated() -> st.SearchStrategy[tuple[list[bytes], Ends, list[str], bool]]:
    options = st.sampled_from([[], [], ["--nbest", "2"], ["--max-tokens", "9"], ["--exit", "1-1"], ["--beam", "1"]])
    return st.tuples(pairs().map(lambda lines: [line for line, _ in lines]), ENDS, options, st.booleans())


def scored() -> st.SearchStrategy[tuple[list[tuple[bytes, bytes]], Ends, list[str]]]:
    return st.tuples(pairs(), ENDS, st.sampled_from([[], ["--tokenised"], ["--segmented"], ["--lowercase"]]))


def reported() -> st.SearchStrategy[tuple[list[tuple[bytes, bytes]], Ends, list[str]]]:
    return st.tuples(pairs(300, 5), ENDS, st.sampled_from([[], ["--oracle"]]))


def checks(tiny: Path, place: Path) -> dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None], int]]:
    """Kinds of text: examples, the check, and the number of examples in CI."""
    return {
        "prepare": (prepared(), lambda case: check_prepare(tiny, place, case), 8),
        "translate": (translated(), lambda case: check_translation(tiny, place, case), 15),
        "score": (scored(), lambda case: check_score(place, case), 15),
        "report": (reported(), lambda case: check_report(tiny, place, case), 3),
    }


KINDS = ("prepare", "translate", "score", "report")


@pytest.mark.parametrize("kind", KINDS)
def test_texts(kind: str, tiny: Path, place: Path) -> None:
    examples, check, number = checks(tiny, place)[kind]
    explore(check, examples, number)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_texts_for_twelve_minutes(tiny: Path, place: Path, record_property: Callable[[str, object], None]) -> None:
    done = {kind: explore_for(180.0, check, examples) for kind, (examples, check, _) in checks(tiny, place).items()}
    record_property("tried", f"texts: {done}")
