"""Import of fairseq's models, dictionaries and binarised text.

The fixtures were written by fairseq 0.12.2 (post, pre) and 0.10.2 (old): tests/fixtures/fairseq/make.py.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.data_directory import DataDirectory, open_tokenizer
from deepspeed_nmt.data.fairseq import BinarisedText, FairseqTokenizer, read_dictionary
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.run.importing_fairseq import read_checkpoint
from tests.commands import refused
from tests.support import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "fairseq"
KINDS = ("post", "pre", "old")


def words(kind: str, *more: str, origin: Path | None = None) -> list[str]:
    """Return a command line that imports from a fixture."""
    path = FIXTURES / kind
    given = [] if origin is None else ["--from", str(origin)]
    return ["import-fairseq", "--data-bin", str(path / "data-bin"), *given, *more]


def text_of(kind: str, name: str) -> list[str]:
    """Return the lines that a fixture's text was binarised from."""
    return (FIXTURES / kind / "data-bin" / name).read_text("utf-8").split("\n")[:-1]


def saved(state: Any, path: Path, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], None], kind: str = "post") -> Path:
    """Write the checkpoint of a fixture with a change."""
    state = torch.load(FIXTURES / kind / "checkpoint.pt", weights_only=False)
    change(state)
    return saved(state, path)


class Malicious:
    """An object whose pickle creates a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Evil(argparse.Namespace):
    """A class that is not allowed, although it is derived from one that is."""


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused(zipped: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for place in ("args", "model", "extra_state"):
        state = {"args": argparse.Namespace(), "model": {}, "extra_state": {}, place: {"x": Malicious(made)}}
        path = saved(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ConfigError, match=r"has posix.mkdir, which is not created.* could run code") as caught:
            read_checkpoint(path)
        assert not made.exists() and "\n" not in str(caught.value)
    torch.load(path, weights_only=False)
    assert made.exists(), "the checkpoint runs code if it is read in another way"


def test_objects_of_other_classes_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "model.pt", lambda state: state.update(args=Evil(), cfg=None))
    with pytest.raises(ConfigError, match=r"has .*Evil, which is not created"):
        read_checkpoint(path)
    # The name is enough: such classes need not be installed.
    content = pickle.dumps({"cfg": Evil(), "model": {}}, protocol=2).replace(
        Evil.__module__.encode(), b"omegaconf.dictconfig"
    )
    content = content.replace(b"Evil", b"DictConfig")
    stream = io.BytesIO()
    torch.save({}, stream, _use_new_zipfile_serialization=False)
    empty = pickle.dumps({}, protocol=2)
    assert stream.getvalue().count(empty) == 1
    (tmp_path / "model.pt").write_bytes(stream.getvalue().replace(empty, content))
    with pytest.raises(ConfigError, match=r"has omegaconf.dictconfig.DictConfig, .*; write a copy where fairseq is"):
        read_checkpoint(tmp_path / "model.pt")


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content in (b"", b"text", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no checkpoint of fairseq, or damaged"):
            read_checkpoint(path)
    for state in ([1], {"model": {"a": 1}}, {"model": {}}, {"model": {}, "cfg": {"model": None}}):
        with pytest.raises(ConfigError, match=r"has no (weights|options)"):
            read_checkpoint(saved(state, path))


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_binarised_text_is_the_text(kind: str) -> None:
    directory = FIXTURES / kind / "data-bin"
    for split, lang in (("train", "de"), ("valid", "en")):
        symbols = read_dictionary(directory / f"dict.{lang}.txt")
        rows = BinarisedText.open(directory / f"{split}.en-de.{lang}", len(symbols)).rows()
        expected = text_of(kind, f"{split}.{lang}")
        assert "unseenword" in expected[-1]
        expected[-1] = expected[-1].replace("unseenword", "<unk>")
        assert [" ".join(symbols[token] for token in row) for row in rows] == expected


def binarise(path: Path, rows: list[list[int]], code: int = 4, dtype: Any = np.int32) -> None:
    """Write binarised text, as fairseq's documentation of the format has it."""
    flat = np.concatenate([np.array(row, dtype) for row in rows]) if rows else np.zeros(0, dtype)
    sizes = np.array([len(row) for row in rows], np.int32)
    places = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64)[: len(rows)] * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + np.array([1], np.int64).tobytes() + bytes([code])
    head += np.array([len(rows)], np.int64).tobytes()
    path.with_name(f"{path.name}.bin").write_bytes(flat.tobytes())
    path.with_name(f"{path.name}.idx").write_bytes(head + sizes.tobytes() + places.tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(4, np.int32), (5, np.int64), (8, np.uint16), (1, np.uint8)])
def test_all_types_of_tokens_are_read(code: int, dtype: Any, tmp_path: Path) -> None:
    lines = 20_000 if code == 8 else 9  # more than are read at once
    rows = [[number % 200 + 4, 5, 2][number % 2 :] for number in range(lines)] + [[2]]
    binarise(tmp_path / "text", rows, code, dtype)
    assert list(BinarisedText.open(tmp_path / "text", 300).rows()) == [row[:-1] for row in rows]
    binarise(tmp_path / "text", [], code, dtype)
    assert list(BinarisedText.open(tmp_path / "text", 300).rows()) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("idx", lambda content: b"x" + content, "no index of binarised text"),
        ("idx", lambda content: content[:-1], "its length is not that of its lines"),
        ("idx", lambda content: content[:9] + b"\x02" + content[10:], "it has version 2"),
        ("bin", lambda content: content[:-1], "no multiple of its tokens"),
        ("bin", lambda content: content[:-4], "is outside of the file"),
        ("bin", lambda content: b"\xff" * 4 + content[4:], "dictionary has 9 symbols"),
    ],
)
def test_damaged_binarised_text_is_refused(
    name: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    binarise(tmp_path / "text", [[4, 8, 2], [5, 2]])
    path = tmp_path / f"text.{name}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        list(BinarisedText.open(tmp_path / "text", 9).rows())


def test_a_tokenizer_reads_as_fairseq() -> None:
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "the@@", "m", "dog", "madeupword0000"]
    tokenizer = FairseqTokenizer((symbols, symbols))
    assert tokenizer.encode(" the@@ m\tdog cat <unk> </s> ") == [4, 5, 6, 3, 3, 3]
    assert tokenizer.decode([4, 5, 6, 3, 2, 0, 1]) == "them dog ⁇"
    assert tokenizer.reference("the@@ m dog") == "them dog" and tokenizer.segmented
    other = FairseqTokenizer((symbols, [*symbols, "a"]))
    assert other.vocabulary.source.size == 8 and other.size == 9 and other.digest != tokenizer.digest
    pieces = FairseqTokenizer(([*symbols[:4], "\u2581a", "\u2581b", "c"],) * 2)
    assert pieces.decode([4, 6, 5]) == "ac b" == pieces.reference("\u2581a c \u2581b")
    assert pieces.reference("ac b") == "ac b", "of words, as decoded text and what is scored as of a run"
    characters = [*symbols[:4], "\u2581", *"abcdefghijklmnopqrst"]
    assert FairseqTokenizer((characters,) * 2).reference("\u2581 a b \u2581 c") == "ab c"
    words = [*symbols[:4], *(f"w{number}" for number in range(200)), "\u2581rare"]
    assert FairseqTokenizer((words,) * 2).reference("w1 w2") == "w1 w2"


def imported(kind: str, run: Path, *more: str, origin: Path | None = None) -> Path:
    """Import the model of a fixture, or another checkpoint with its dictionaries."""
    at = origin or FIXTURES / kind / "checkpoint.pt"
    languages = ("--source-lang", "en", "--target-lang", "de")
    assert main(words(kind, *languages, "--run", str(run), *more, origin=at)) == 0
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of all fixtures as runs."""
    scratch = tmp_path_factory.mktemp("fairseq")
    return {kind: imported(kind, scratch / kind) for kind in KINDS}


def logits_here(run: Path, expected: dict[str, Tensor]) -> Tensor:
    model = Translator.open(run, device="cpu").model
    assert isinstance(model, TranslationModel)
    # fairseq pads sources on the left.
    source_BS = pad_sequence([row[row.ne(1)] for row in expected["source"]], batch_first=True, padding_value=1)
    with torch.inference_mode():
        logits: Tensor = model.projection(model.decode(expected["target_input"], model.encode(source_BS))[0])
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_fairseq(kind: str, runs: dict[str, Path]) -> None:
    expected = load_file(FIXTURES / kind / "expected.safetensors")
    assert expected["source"].eq(1).any(), "without padding, nothing shows where positions begin"
    real_BT = expected["target_input"].ne(1)
    difference = (logits_here(runs[kind], expected) - expected["logits"])[real_BT].abs().max()
    assert difference < 1e-5
    assert expected["logits"].std() > 1.0, "equal logits of a constant model would show nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam", [1, 5])
def test_translations_are_those_of_fairseq_generate(kind: str, beam: int, runs: dict[str, Path]) -> None:
    expected = json.loads((FIXTURES / kind / "expected.json").read_text("utf-8"))
    translator = Translator.open(runs[kind], device="cpu", beam=beam, max_length_extra=61)
    translations = translator.translate(text_of("post" if kind == "old" else kind, "valid.en"))
    for one, (text, score) in zip(translations, expected["translations"][str(beam)], strict=True):
        assert " ".join(translator.tokenizer.pieces(one.tokens)) == text
        assert one.score == pytest.approx(score * math.log(2), abs=1e-4)  # fairseq prints bits


def test_no_translation_is_empty_as_in_fairseq_generate(runs: dict[str, Path]) -> None:
    empty = []
    for least in (None, 1):
        settings = {"beam": 20, "length_penalty": "none", "max_length_extra": 20, "min_length": least}
        found = Translator.open(runs["old"], device="cpu", **settings).translate([".", "p"])
        empty.append([not each.tokens for each in found])
    assert empty == [[False, False], [True, True]]


def test_a_search_predicts_eos_although_the_decoder_reads_it_first(runs: dict[str, Path]) -> None:
    translator = Translator.open(runs["post"], device="cpu")
    vocabulary = translator.tokenizer.vocabulary
    assert (vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.unk) == (1, 2, 2, 3)
    assert vocabulary.unpredicted == (1,) and Vocabulary(9, mask=4).unpredicted == (0, 1, 4)
    for search in ("beam", "diverse_beam", "sampling"):
        opened = Translator.open(runs["post"], device="cpu", name=search, max_length_ratio=0.0, max_length_extra=99)
        (best,) = opened.translate(text_of("post", "valid.en")[:1])
        assert 0 < len(best.tokens) < 98 and not {1, 2} & set(best.tokens), search


def option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: setattr(state["cfg"]["model"], name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (option("encoder_learned_pos", True), "has encoder_learned_pos=True"),
        (lambda state: state["model"].pop("decoder.version"), "older than fairseq 0.7"),
        (option("activation_fn", "tanh"), "has activation_fn='tanh'"),
        (option("decoder_normalize_before", True), "lacks decoder.layer_norm.weight; use another"),
        (lambda state: state["model"].update({"decoder.gate.weight": torch.ones(2)}), "decoder.gate.weight"),
        (lambda state: state["model"].pop("decoder.layers.1.fc2.bias"), "lacks decoder.layers.1.fc2.bias"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "pre" if "0.7" in message else "post"
    path = changed(tmp_path / "model.pt", change, kind)
    assert main(words(kind, "--run", str(tmp_path / "run"), origin=path)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_other_spellings_of_a_model_are_the_same_model(
    tmp_path: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as of fairseq 0.7, settings of fairseq-hydra-train, half precision, untied, a user's architecture."""

    def older(state: dict[str, Any]) -> None:
        weights = state["model"]
        for name in [name for name in weights if "_attn.q_proj." in name]:
            parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
            weights[name.replace("q_proj.", "in_proj_")] = torch.cat([weights.pop(part) for part in parts])
        del weights["decoder.output_projection.weight"]
        state["extra_state"] = {"train_meters": {"train_loss": meters.AverageMeter()}}

    def hydra(state: dict[str, Any]) -> None:
        model = vars(state["cfg"]["model"])
        nested: dict[str, Any] = {"encoder": {}, "decoder": {}}
        for name, value in model.items():
            side, _, rest = name.partition("_")
            (nested[side] if side in ("encoder", "decoder") else nested)[rest if side in nested else name] = value
        state["cfg"]["model"] = nested
        state["cfg"]["criterion"]["label_smoothing"] = nested.pop("label_smoothing") + 0.1

    def half(state: dict[str, Any]) -> None:
        state["model"] = {name: weight.half().float() for name, weight in state["model"].items()}

    meters: Any = ModuleType("fairseq.meters")
    meters.AverageMeter = type("AverageMeter", (), {"__module__": "fairseq.meters"})
    monkeypatch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.meters", meters)
    expected = load_file(FIXTURES / "post" / "expected.safetensors")
    own = logits_here(runs["post"], expected)
    untied = option("share_all_embeddings", False)  # of weights that share memory
    for number, change in enumerate((older, hydra, half, untied, option("arch", "my_transformer"))):
        path = changed(tmp_path / f"{number}.pt", change)
        run = imported("post", tmp_path / f"run{number}", origin=path)
        difference = (logits_here(run, expected) - own).abs().max()
        assert difference < (1e-5 if change is not half else 0.1), change
        objective = yaml.safe_load((run / "config.yaml").read_text())["objective"]
        assert objective == {"label_smoothed": {"smoothing": 0.2 if change is hydra else 0.1}}
    assert "the architecture my_transformer is not one of fairseq's own" in capsys.readouterr().err


class Pointers:
    """An array of objects whose pickle has their addresses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.ndarray, ((1,), np.dtype("O"), b"A" * 8)


def weight(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["model"].update({name: value})


UP, IN = "encoder.layers.0.fc1.weight", "encoder.layers.0.self_attn.in_proj_weight"
HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    f"{name}={value!r:.20}": option(name, value)
    for name in ("encoder_layers", "encoder_embed_dim", "dropout", "activation_fn")
    for value in ([1], {"a": 1}, torch.ones(2), np.ones(2), Pointers(), -1, 10**400, math.nan, 100_000, None, b"x")
    if not (value is None and name in ("dropout", "activation_fn"))
} | {
    "languages": option("source_lang", "../de"),
    "an array among the options": option("encoder_learned_pos", Pointers()),
    "a tensor among the options": option("moe_freq", torch.zeros(2)),
    "options without text": lambda state: vars(state["cfg"]["model"]).update({3: 4}),
    "no options": lambda state: state["cfg"].update(model=[1]),
    "a weight that is a list": weight(UP, [1.0]),
    "a weight that is an array": weight(UP, np.ones(2)),
    "a sparse weight": weight(UP, torch.eye(12).to_sparse()),
    "a quantized weight": lambda state: state["model"].update(
        {UP: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}
    ),
    "a weight without storage": weight(UP, torch.ones(4, device="meta")),
    "a nested weight": lambda state: state["model"].update(
        {UP: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}
    ),
    "integers": weight(UP, torch.ones(16, 12, dtype=torch.int64)),
    "one number as a matrix": weight(UP, torch.ones(1).expand(10**6, 10**6)),
    "a name that is no text": lambda state: state["model"].update({7: torch.ones(1)}),
    "NaN": lambda state: state["model"][UP].view(-1)[3:4].fill_(math.nan),
    "infinity": lambda state: state["model"][UP].view(-1)[3:4].fill_(-math.inf),
    "joined matrices without rows": weight(IN, torch.tensor(1.0)),
    "joined matrices of other rows": weight(IN, torch.ones(4, 12)),
    "a layer more": weight("decoder.layers.7.fc1.bias", torch.ones(16)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of the kinds of tensors that are made
def test_each_hostile_checkpoint_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, change in HOSTILE.items():
        path = changed(tmp_path / "model.pt", change)
        assert main(words("post", "--run", str(tmp_path / "run"), origin=path)) == 2, name
        said = capsys.readouterr().err.strip()
        assert said and len(said) < 2000 and not (tmp_path / "run").exists(), name
    os.mkfifo(tmp_path / "pipe")
    assert main(words("post", "--run", str(tmp_path / "run"), origin=tmp_path / "pipe")) == 2
    assert "is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_checkpoint_is_refused_or_the_same(
    zipped: bool, tmp_path: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte of the pickle is another one."""
    state = torch.load(FIXTURES / "post" / "checkpoint.pt", weights_only=False)
    state["extra_state"] = [Pointers(), np.arange(3)]
    path = saved(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    content, random, given = path.read_bytes(), np.random.default_rng(3), read_checkpoint(path)
    assert given.options.encoder_layers == 2
    refused = 0
    for place in random.integers(0, min(len(content), 8000), 100):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 10


def test_a_data_directory_has_the_tokens_of_the_binarised_text(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its vocabulary is that of the run, which can be trained further on it."""
    for kind in ("post", "pre"):
        out = tmp_path / kind
        keep = ["--max-ratio", "99", "--keep-duplicates", "--workers", "1"]
        assert main(words(kind, "--out", str(out), *keep)) == 0
        data = DataDirectory.open(out)
        assert open_tokenizer(out).digest == open_tokenizer(runs[kind]).digest
        assert data.meta.segmented and data.text_form.target_lang == "de" and data.meta.splits["train"].pairs == 20
        for split in ("train", "valid"):
            directory = FIXTURES / kind / "data-bin"
            corpus = data.corpus(split)
            for read, lang in ((corpus.source, "en"), (corpus.target, "de")):
                rows = BinarisedText.open(directory / f"{split}.en-de.{lang}", 1000).rows()
                assert [read(number).tolist() for number in range(len(corpus))] == list(rows)
        assert not any(".text-" in path.name for path in tmp_path.iterdir())


def test_a_corpus_without_training_text_or_a_file_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(FIXTURES / "post" / "data-bin", tmp_path / "data-bin")
    command = ["import-fairseq", "--data-bin", str(directory), "--out", str(tmp_path / "out")]
    (directory / "valid.en-de.de.bin").rename(directory / "test.en-de.de.bin")
    refused(command, capsys, f"the binarised text {directory}/valid.en-de.de.bin cannot be read (No such file")
    for file in directory.glob("train.*"):
        file.unlink()
    shutil.copy(directory / "valid.en-de.en.idx", directory / "test.en-de.en.idx")
    refused(command, capsys, "no binarised text train.en-de.en.idx", "that of test and valid only", "--trainpref")
    assert not (tmp_path / "out").exists()


def test_raw_text_is_segmented_by_the_sentencepiece_model(tmp_path: Path) -> None:
    model = FIXTURES / "pre" / "spm.model"
    run = imported("pre", tmp_path / "run", "--sentencepiece", str(model))
    translator = Translator.open(run, device="cpu")
    pieces = text_of("pre", "valid.en")[0]
    plain = pieces.replace(" ", "").replace("\u2581", " ").strip()
    assert not translator.tokenizer.segmented
    assert translator.tokenizer.pieces(translator.tokenizer.encode(plain), "source") == pieces.split()
    assert "\u2581" not in translator.translate([plain])[0].text
    assert main(words("pre", "--out", str(tmp_path / "data"), "--sentencepiece", str(model), "--workers", "1")) == 0
    data = DataDirectory.open(tmp_path / "data")
    assert data.text_form.form == "raw" and data.tokenizer().digest == translator.tokenizer.digest
    valid = (tmp_path / "data" / "valid.source").read_text("utf-8").splitlines()
    assert valid[0] == plain
    with pytest.raises(DataError, match="symbols of the source's dictionary"):
        symbols = read_dictionary(FIXTURES / "post" / "data-bin" / "dict.en.txt")
        FairseqTokenizer((symbols, symbols), (model.read_bytes(),) * 2)
