"""Import of fairseq's models, dictionaries and binarised text.

The fixtures were written by fairseq 0.12.2 (post, pre) and 0.10.2 (old): tests/fixtures/fairseq/make.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.directory import DataDirectory, open_tokenizer
from deepspeed_nmt.data.fairseq_binarised import BinarisedText
from deepspeed_nmt.data.fairseq_dictionary import read_dictionary
from deepspeed_nmt.data.fairseq_tokenizer import FairseqTokenizer
from deepspeed_nmt.errors import DataError
from tests.fairseq_fixtures import FIXTURES, KINDS, text_of, words


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
    wanted = expected["translations"][str(beam)]
    translator = Translator.open(runs[kind], device="cpu", beam=beam, max_length_extra=61)
    found = translator.translate(text_of("post" if kind == "old" else kind, "valid.en"))
    assert len(found) == len(wanted)
    for each, (text, score) in zip(found, wanted, strict=True):
        assert " ".join(translator.tokenizer.pieces(each.tokens)) == text
        assert each.score == pytest.approx(score * math.log(2), abs=1e-4)  # fairseq prints bits


def test_a_search_predicts_eos_although_the_decoder_reads_it_first(runs: dict[str, Path]) -> None:
    translator = Translator.open(runs["post"], device="cpu")
    vocabulary = translator.tokenizer.vocabulary
    assert (vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.unk) == (1, 2, 2, 3)
    assert vocabulary.unpredicted == (1,) and Vocabulary(9).unpredicted == (0, 1)
    for search in ("beam", "diverse_beam", "sampling"):
        opened = Translator.open(runs["post"], device="cpu", name=search, max_length_ratio=0.0, max_length_extra=99)
        (found,) = opened.translate(text_of("post", "valid.en")[:1])
        assert 0 < len(found.tokens) < 98 and not {1, 2} & set(found.tokens), search


def saved(state: Any, path: Path, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], None], kind: str = "post") -> Path:
    """Write the checkpoint of a fixture with a change."""
    state = torch.load(FIXTURES / kind / "checkpoint.pt", weights_only=False)
    change(state)
    return saved(state, path)


def option(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: setattr(state["cfg"]["model"], name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (option("adaptive_softmax_cutoff", "5000,20000"), "must not have adaptive_softmax_cutoff, which"),
        (option("encoder_learned_pos", True), "must not have encoder_learned_pos"),
        (option("no_scale_embedding", True), "must not have no_scale_embedding"),
        (option("layernorm_embedding", True), "must not have layernorm_embedding"),
        (option("activation_fn", "tanh"), "activation_fn of relu, gelu, swish, but that of"),
        (option("decoder_ffn_embed_dim", 24), "same encoder_ffn_embed_dim and decoder_ffn_embed_dim, but"),
        (option("decoder_normalize_before", True), "same encoder_normalize_before and decoder_normalize_before"),
        (option("decoder_output_dim", 8), "decoder_output_dim equal to decoder_embed_dim"),
        (
            lambda state: state["model"].update({"decoder.gate.weight": torch.ones(2)}),
            "among them decoder.gate.weight",
        ),
        (lambda state: state["model"].pop("decoder.layers.1.fc2.bias"), "must have decoder.layers.1.fc2.bias as"),
        (
            lambda state: state["model"].update({"decoder.output_projection.weight": torch.ones(3, 12)}),
            "among them decoder.output_projection.weight",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(tmp_path / "model.pt", change)
    assert main(words("post", "--run", str(tmp_path / "run"), origin=path)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_pre_norm_model_of_an_old_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path / "model.pt", lambda state: state["model"].pop("decoder.version"), "pre")
    assert main(words("pre", "--run", str(tmp_path / "run"), origin=path)) == 2
    assert "fairseq 0.7 or newer if it is pre-norm" in capsys.readouterr().err


def test_other_spellings_of_a_model_are_the_same_model(tmp_path: Path, runs: dict[str, Path]) -> None:
    """Weights as fairseq 0.6 named them, settings as fairseq-hydra-train saves them, half precision."""

    def older(state: dict[str, Any]) -> None:
        weights = state["model"]
        for name in [name for name in weights if "_attn.q_proj." in name]:
            parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
            weights[name.replace("q_proj.", "in_proj_")] = torch.cat([weights.pop(part) for part in parts])
        norms = {"encoder": ["self_attn", "final"], "decoder": ["self_attn", "encoder_attn", "final"]}
        for name in [name for name in weights if "_layer_norm." in name]:
            start, part, kind = name.rsplit(".", 2)
            number = norms[name.split(".")[0]].index(part.removesuffix("_layer_norm"))
            weights[f"{start}.layer_norms.{number}.{kind}"] = weights.pop(name)
        del weights["decoder.output_projection.weight"]

    def hydra(state: dict[str, Any]) -> None:
        model = vars(state["cfg"]["model"])
        nested: dict[str, Any] = {"encoder": {}, "decoder": {}}
        for name, value in model.items():
            side, _, rest = name.partition("_")
            (nested[side] if side in ("encoder", "decoder") else nested)[rest if side in nested else name] = value
        state["cfg"]["model"] = nested

    def half(state: dict[str, Any]) -> None:
        state["model"] = {name: weight.half().float() for name, weight in state["model"].items()}

    expected = load_file(FIXTURES / "post" / "expected.safetensors")
    wanted = logits_here(runs["post"], expected)
    for number, change in enumerate((older, hydra, half)):
        path = changed(tmp_path / f"{number}.pt", change)
        run = imported("post", tmp_path / f"run{number}", origin=path)
        difference = (logits_here(run, expected) - wanted).abs().max()
        assert difference < (1e-5 if change is not half else 0.1), change


def test_an_architecture_of_the_users_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    imported("post", tmp_path / "run", origin=changed(tmp_path / "model.pt", option("arch", "my_transformer")))
    assert "the architecture my_transformer is not one of fairseq's own" in capsys.readouterr().err


def test_a_data_directory_has_the_tokens_of_the_binarised_text(runs: dict[str, Path], tmp_path: Path) -> None:
    """Its vocabulary is that of the run, which can be trained further on it."""
    for kind in ("post", "pre"):
        out = tmp_path / kind
        keep = ["--max-ratio", "99", "--keep-duplicates", "--workers", "1"]
        assert main(words(kind, "--out", str(out), *keep)) == 0
        data, names = DataDirectory.open(out), {each.name for each in tmp_path.iterdir()}
        assert open_tokenizer(out).digest == open_tokenizer(runs[kind]).digest
        assert data.meta.segmented and data.text_form.target_lang == "de" and data.meta.splits["train"].pairs == 20
        for split in ("train", "valid"):
            directory = FIXTURES / kind / "data-bin"
            for side, lang in (("source", "en"), ("target", "de")):
                wanted = BinarisedText.open(directory / f"{split}.en-de.{lang}", 1000).rows()
                corpus = data.corpus(split)
                read = corpus.source if side == "source" else corpus.target
                assert [read(number).tolist() for number in range(len(corpus))] == list(wanted)
        assert not any(".text-" in name for name in names)


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
    with pytest.raises(DataError, match=r"must have the symbols of the source's dictionary, but lacks"):
        symbols = read_dictionary(FIXTURES / "post" / "data-bin" / "dict.en.txt")
        FairseqTokenizer((symbols, symbols), (model.read_bytes(),) * 2)


def test_a_warm_start_trains_the_imported_weights(tmp_path: Path) -> None:
    run, data, tuned = (tmp_path / name for name in ("run", "data", "tuned"))
    imported("post", run, "--out", str(data), "--workers", "1")
    small = ["batch.update_tokens=300", "batch.micro_tokens=600", "training.max_updates=2", "collapse.every=0"]
    small += ["validation.metrics=[]", "engine.device=cpu", "engine.name=plain", "optimizer.lr=1e-9"]
    line = ["train", "--config", str(run / "config.yaml"), "--data", str(data)]
    assert main([*line, "--run", str(tuned), "--init-from", str(run), *small]) == 0
    before, after = (Translator.open(each, device="cpu").model for each in (run, tuned))
    assert isinstance(before, TranslationModel) and isinstance(after, TranslationModel)
    parameters = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        assert (parameter - parameters[name]).abs().max() < 1e-6, name


def test_a_page_of_an_imported_model_shows_its_settings(runs: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", "run", str(runs["post"]), "--out", str(page)]) == 0
    assert "length_penalty" in page.read_text(encoding="utf-8")


def test_an_imported_model_is_exported(runs: dict[str, Path], tmp_path: Path) -> None:
    """EOS is the first token of the decoder there, too."""
    pytest.importorskip("ctranslate2")
    source, reference = (str(FIXTURES / "post" / "data-bin" / f"train.{lang}") for lang in ("en", "de"))
    line = ["export", "--run", str(runs["post"]), "--format", "ctranslate2", "--out", str(tmp_path / "out")]
    assert main([*line, "--source", source, "--reference", reference]) == 0
