"""Exported weights: other programs give each token the probability that this program gives it.

Legend: B sentences, S source length, T target length, V vocabulary.
"""

import json
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_nmt import huggingface
from deepspeed_nmt.api import Translator
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.vocabulary_training import train_subwords
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.export.certificate import AT_LIMIT, LEFT_OUT, Comparison, Difference, ExportInfo
from deepspeed_nmt.export.ctranslate2_search import CTranslate2Search, ExportBeamSettings
from deepspeed_nmt.export.ctranslate2_weights import write_ctranslate2
from deepspeed_nmt.export.formats import OwnProgram, Subject
from deepspeed_nmt.export.runtime import choose
from deepspeed_nmt.methods import LAYERS, MODELS
from deepspeed_nmt.nn.layers import DecoderLayer
from deepspeed_nmt.run.exporting import FORMATS, reason_of
from deepspeed_nmt.run.importing import import_marian
from deepspeed_nmt.search.base import Hypothesis
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.text import TextForm

transformers = pytest.importorskip("transformers")
pytest.importorskip("ctranslate2")

TEXT = [f"the {a} {b} and the {b} {c}" for a in ("old", "new", "red") for b in ("dog", "cat") for c in ("run", "eat")]
SMALL = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 3, "activation": "gelu"}
CAD = {"name": "cross_attention_drop", "drop_depth": 2}
CHAIN = {"sharing": "closed_chain", "repeat_input": False}
SOURCES = [[5, 9, 4, 30, 11], [7], [12, 12, 13, 8, 6, 21, 22, 10]]
MARGINS = {"the two translations", "their first different tokens", "hypotheses of the beam"}
TARGETS = [[6, 8, 4], [9, 9, 30, 31, 12, 5], []]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_subwords(TEXT, 48)


def build(model: dict[str, Any], layer: dict[str, Any] | None = None, vocabulary: Vocabulary | None = None) -> Any:
    """Return a model none of whose parameters has the value of its initialisation."""
    settings: dict[str, Any] = {"model": {"name": "transformer", **SMALL, **model}}
    config = validate(settings if layer is None else {**settings, "layer": layer})
    torch.manual_seed(3)
    make_layer = partial(LAYERS[config.layer.name].build, config.layer)
    made = MODELS[config.model.name].build(config.model, vocabulary or Vocabulary(48), make_layer)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def largest_difference(format: str, model: TranslationModel, tokenizer: Tokenizer, directory: Path) -> float:
    """Export a model, and return the largest difference of a token's log-probability."""
    subject = Subject(model, tokenizer, 64, "fp32")
    FORMATS[format].write(directory, subject)
    there = FORMATS[format](directory, subject).token_log_probs(SOURCES, TARGETS)
    here = OwnProgram(model, tokenizer.vocabulary).token_log_probs(SOURCES, TARGETS)
    assert [len(each) for each in there] == [len(target) + 1 for target in TARGETS]
    return max(
        abs(a - b) for ours, theirs in zip(here, there, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


EXPRESSED = {
    "pre": ({}, None, None),
    "post": ({"norm": "post", "activation": "relu"}, None, None),
    "deepnorm": ({"norm": "deepnorm"}, None, None),
    "layernorm_scaling": ({"norm": "layernorm_scaling"}, None, None),
    "layer_scale": ({"norm": "layer_scale"}, CAD, None),
    "completep": ({"norm": "completep"}, None, None),
    "pre and post": ({"decoder_norm": "post"}, None, None),
    "post and pre": ({"norm": "post", "decoder_norm": "pre"}, None, None),
    "three matrices": ({"norm": "post", "share_embeddings": "none"}, None, None),
    "pre, two matrices": ({"share_embeddings": "decoder"}, None, None),
    "cross-attention drop, pre": ({}, CAD, None),
    "cross-attention drop, post": ({"norm": "post"}, CAD, None),
    "cross-attention drop, pre and post": ({"decoder_norm": "post"}, CAD, None),
    "cross-attention drop, deepnorm": ({"norm": "deepnorm"}, CAD, None),
    "exit 1-2": ({}, None, "1-2"),
    "one loop": ({"name": "recurrent", "encoder_loops": 3, "decoder_loops": 2}, None, "1-1"),
    "three loops": ({"name": "recurrent", "encoder_loops": 3, "decoder_loops": 2, **CHAIN}, None, None),
    "two of three loops": ({"name": "recurrent", "encoder_loops": 3, **CHAIN}, CAD, "2-1"),
    "shallow": ({"name": "depth_growing"}, None, "shallow"),
    "swish, Marian's positions, bias": (
        {"norm": "post", "activation": "swish", "positions": "marian", "output_bias": True},
        None,
        None,
    ),
}


@pytest.mark.parametrize("format", ["ctranslate2", "huggingface"])
@pytest.mark.parametrize(("model", "layer", "exit"), EXPRESSED.values(), ids=EXPRESSED)
def test_another_program_gives_the_same_probabilities(
    format: str, model: Any, layer: Any, exit: str | None, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = build(model, layer).at_exit(exit or "top")
    # A layer without cross-attention meets two LayerNorms in post-norm, the second of which has no eps.
    norms = {model.get("norm", "pre"), model.get("decoder_norm")} - {None}
    bound = 2e-4 if layer is not None and norms != {"pre"} else 2e-5
    if format == "huggingface" and len(norms) > 1:
        with pytest.raises(NotStandardError, match=r"encoder is \w+-norm and its decoder \w+-norm"):
            FORMATS[format].check(made)
        return
    assert largest_difference(format, made, tokenizer, tmp_path) < bound


def test_two_vocabularies_are_exported_for_transformers_with_post_norm_alone() -> None:
    two = replace(Vocabulary(48), own_source=Vocabulary(30))
    FORMATS["huggingface"].check(build({"norm": "post", "share_embeddings": "decoder"}, vocabulary=two))
    with pytest.raises(NotStandardError, match="is pre-norm and has two vocabularies"):
        FORMATS["huggingface"].check(build({"share_embeddings": "decoder"}, vocabulary=two))


def test_a_certificate_counts_near_ties_rules_and_what_nothing_explains() -> None:
    kinds = [(0.1, True)] * 3 + [(None, True)] * 2 + [(0.9, False)]
    differences = tuple(
        Difference(line=line, here="a", there="b", margin=margin, kind="beam", explained=explained)
        for line, (margin, explained) in enumerate(kinds, 1)
    )
    numbers = {"score_difference": 0.0, "tolerance": 0.2, "bleu_here": None, "bleu_there": None}
    times = {"seconds_here": 1.0, "seconds_there": 2.0}
    made = Comparison(beam=4, sentences=10, identical=4, differences=differences, **numbers, **times)
    assert made.row()[:6] == ["4", "10", "40.00%", "3", "2", "1"]


def test_translations_that_may_be_longer_than_an_export_are_refused() -> None:
    search = ExportBeamSettings(beam=2, length_penalty="none", max_length_ratio=1.5, max_length_extra=10)
    of_run = {"search_name": "beam", "search": search, "rules": {}, "text": TextForm("raw"), "model": {}}
    info = ExportInfo(exporter="ctranslate2", precision="fp32", longest=64, longest_line=30, **of_run)

    def limit(**changes: Any) -> int:
        options = DecodeOptions.of({"export": Path("here"), **changes})
        return choose(options, info, Path("here"))[0].limit(31, 1000)

    assert limit() == 56 and limit(max_length_ratio=1.7) == 62
    assert limit(max_length_ratio=4.0, max_length=64) == limit(max_length_extra=99, max_length=64) == 64
    for changes in ({"max_length_ratio": 2.0}, {"max_length_extra": 19}, {"max_source_tokens": 40}):
        with pytest.raises(ConfigError, match=r"allow a translation \d+ tokens, but the export has 64 positions"):
            limit(**changes)


RELATIVE = {"name": "relative_positions", "clip_distance": 2}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_relative_positions_are_exported_for_ctranslate2_alone(
    norm: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = build({**RELATIVE, "norm": norm})
    assert largest_difference("ctranslate2", made, tokenizer, tmp_path) < 2e-5
    with pytest.raises(NotStandardError, match="relative positions, and transformers has no class"):
        FORMATS["huggingface"].check(made)
    with pytest.raises(NotStandardError, match="each head has relative positions"):
        build({**RELATIVE, "edges": "head"}).described()
    with pytest.raises(NotStandardError, match="both relative and absolute"):
        build({**RELATIVE, "positions": "tensor2tensor"}).described()


def test_ctranslate2_knows_special_tokens_by_their_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    vocabulary, names = tokenizer.vocabulary, [f"[{piece}]" for piece in tokenizer.all_pieces("target")]
    pieces = tokenizer.all_pieces("source"), names
    write_ctranslate2(tmp_path, build({}).described(), vocabulary, pieces, 64, "fp32")
    config = json.loads((tmp_path / "config.json").read_text())
    for name, number in (("unk", vocabulary.unk), ("bos", vocabulary.bos), ("eos", vocabulary.eos)):
        assert config[f"{name}_token"] == names[number]
    assert config["decoder_start_token"] == names[vocabulary.bos]


def test_a_layer_that_computes_something_else_is_refused() -> None:
    class Other(DecoderLayer):
        pass

    model = build({})
    model.decoder.layers[1].__class__ = Other
    with pytest.raises(NotStandardError, match="layer 2 of its decoder is no standard layer"):
        model.described()


@pytest.mark.parametrize(
    ("settings", "biases"),
    [
        ({}, (2.0, -9.0)),  # as in a model that is trained
        ({"beam": 1}, (2.0, -9.0)),
        ({"beam": 1}, (2.5, 1.7)),
        ({"beam": 3, "length_penalty": "none"}, (2.0, -9.0)),
        ({"beam": 1, "max_length_ratio": 0.5, "max_length_extra": 1}, (2.0, -9.0)),
    ],
)
def test_ctranslate2_searches_as_this_program(
    settings: dict[str, Any], biases: tuple[float, float], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Also at the length limits, which most of the sentences reach, and where padding and BOS are likely."""
    model, vocabulary = build({"output_bias": True}), tokenizer.vocabulary
    with torch.no_grad():
        model.projection.bias[vocabulary.eos] += biases[0]
        model.projection.bias[[vocabulary.pad, vocabulary.bos]] += biases[1]
    pieces = tokenizer.all_pieces("source"), tokenizer.all_pieces("target")
    write_ctranslate2(tmp_path, model.described(), vocabulary, pieces, 64, "fp32")
    config = BeamConfig(**settings)
    wanted = ExportBeamSettings(**{key: getattr(config, key) for key in ExportBeamSettings.model_fields})
    torch.manual_seed(1)
    sources = [torch.randint(4, 48, (length,)).tolist() for length in (1, 2, 3, 5, 8, 8, 9, 12) for _ in range(3)]
    found = dict(CTranslate2Search(tmp_path, tokenizer, 64, "fp32").search(sources, wanted, 60))
    search = BeamSearch(config, model, vocabulary)
    assert sorted(found) == list(range(len(sources)))
    for number, source in enumerate(sources):
        best = search.search(torch.tensor([[*source, vocabulary.eos]]), False)[0][0]
        assert found[number][0].tokens == best.tokens, source
        assert found[number][0].score == pytest.approx(best.score, abs=1e-4)
        assert len(best.tokens) < wanted.limit(len(source) + 1, 64)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"length_penalty": "gnmt:0.6"}, {LEFT_OUT}),
        ({"length_penalty": "power:0.6"}, MARGINS),
        ({"length_penalty": "gnmt:0.6", "beam": 1}, MARGINS),
        ({"length_penalty": "gnmt:0.6", "max_length_ratio": 1.0, "max_length_extra": 0}, {AT_LIMIT}),
    ],
)
def test_a_difference_has_a_rule_or_a_margin(
    settings: dict[str, Any], expected: set[str], tokenizer: Tokenizer
) -> None:
    """The longer translation is better by the power of its length, by which CTranslate2 keeps hypotheses."""
    subject = Subject(build({}).eval(), tokenizer, 64, "fp32")
    beam = BeamConfig(**{"beam": 4, **settings})
    wanted = ExportBeamSettings(**{key: getattr(beam, key) for key in ExportBeamSettings.model_fields})
    own, other = Hypothesis([5], -2.0, -3.0), Hypothesis([5, 6, 7], -1.5, -3.5)
    margin, kind = reason_of(subject, [7, 8, 9], own, other, wanted)
    assert kind in expected and (margin is None) == (expected is not MARGINS)


def marian(directory: Path, tokenizer: Tokenizer, **changes: Any) -> Any:
    """Write a MarianMT model with its own initialisation, bias and tokenizer, and return it."""
    model = build({"norm": "post", "positions": "marian"})
    subject = Subject(model, tokenizer, 64, "fp32")
    FORMATS["huggingface"].write(directory, subject)
    config = json.loads((directory / "config.json").read_text())
    special = {"pad_token_id": 0, "bos_token_id": None, "decoder_start_token_id": 0, "forced_eos_token_id": 2}
    config |= {"activation_function": "swish", **special, **changes}
    made = transformers.MarianMTModel(transformers.MarianConfig(**config)).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in [*made.named_parameters(), ("", made.final_logits_bias)]:
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(directory)
    return made


UNTIED = {"share_encoder_decoder_embeddings": False}


@pytest.mark.parametrize(
    "changes", [{}, UNTIED, {**UNTIED, "tie_word_embeddings": False}], ids=["one", "two", "three"]
)
def test_an_imported_model_has_the_same_logits(changes: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    there = marian(tmp_path / "there", tokenizer, **changes)
    import_marian(str(tmp_path / "there"), tmp_path / "run")
    translator = Translator.open(tmp_path / "run", device="cpu")
    model = translator.model
    assert isinstance(model, TranslationModel)
    source_BS, target_BT = (
        torch.tensor([[5, 9, 4, 30, 11, 2], [7, 8, 2, 0, 0, 0]]),
        torch.tensor([[0, 6, 8], [0, 9, 9]]),
    )
    with torch.inference_mode():
        logits_BTV = model.projection(model.decode(target_BT, model.encode(source_BS))[0])
        wanted_BTV = there(input_ids=source_BS, attention_mask=source_BS.ne(0), decoder_input_ids=target_BT).logits
    assert (logits_BTV - wanted_BTV).abs().max() < 1e-5
    assert wanted_BTV.std() > 0.3, "equal logits of a constant model would show nothing"


def test_an_imported_tokenizer_reads_as_the_original(there: Path, tmp_path: Path) -> None:
    import_marian(str(there), tmp_path / "run")
    theirs = transformers.MarianTokenizer.from_pretrained(there)
    translator = Translator.open(tmp_path / "run", device="cpu")
    assert isinstance(translator.search, BeamConfig)
    assert (translator.search.beam, translator.search.length_penalty) == (6, "power:0.7")
    ours = translator.tokenizer
    for line in ["the red dog and the cat", "a dogma   xyz", "", "éé the"]:
        assert [*ours.encode(line), 2] == theirs(line)["input_ids"], line
    assert ours.decode(ours.encode("the red dog and")) == "the red dog and"
    assert ours.vocabulary == Vocabulary(48, pad=0, bos=0, eos=2, unk=3)
    (tmp_path / "run" / "vocabulary.numbers.json").write_text('{"a": 0}')
    with pytest.raises((DataError, CheckpointError), match=r"vocabulary.numbers.json"):
        Translator.open(tmp_path / "run", device="cpu")


def test_vocabularies_with_other_special_tokens_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (folder := tmp_path / "there").mkdir()
    marian(folder, tokenizer, **UNTIED)
    config = json.loads((folder / "config.json").read_text())
    assert config["dropout"] == config["attention_dropout"] == 0.0, "of the model that was written"
    numbers = json.loads((folder / "vocab.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"separate_vocabs": True}))
    word = next(piece for piece in numbers if piece.startswith("▁"))
    for one in ("<unk>", "</s>"):
        swapped = {**numbers, one: numbers[word], word: numbers[one]}
        (folder / "target_vocab.json").write_text(json.dumps(swapped))
        with pytest.raises(ConfigError, match="have other numbers for <unk> or EOS"):
            import_marian(str(folder), tmp_path / "run")


def test_pieces_that_the_target_side_lacks_are_decoded_as_by_the_original(there: Path, tmp_path: Path) -> None:
    models = train_subwords(["zwei und vier fische schwimmen im see", "quirlig", "jobs"], 40).sentencepiece_models()
    assert models is not None
    shutil.copytree(there, tmp_path / "there")
    (tmp_path / "there" / "target.spm").write_bytes(models[1])
    import_marian(str(tmp_path / "there"), tmp_path / "run")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "there")
    ours = Translator.open(tmp_path / "run", device="cpu").tokenizer
    tokens = ours.encode("the red dog and the cat")
    assert ours.decode(tokens) == theirs.decode(tokens) == "the red dog and the cat"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scale_embedding": False, "activation_function": "tanh", "decoder_ffn_dim": 8},
            r"(?s)ffn_dim 24 in its encoder and 8.*scale_embedding.*activation_function tanh",
        ),
        ({"vocab_size": 60, "decoder_vocab_size": 60}, "tokens for 60 and 60 rows"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    changes: Any, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    marian(tmp_path / "there", tokenizer, **changes)
    with pytest.raises(ConfigError, match=message):
        import_marian(str(tmp_path / "there"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def there(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MarianMT model in a folder."""
    folder = tmp_path_factory.mktemp("marian")
    there = marian(folder, tokenizer)
    there.generation_config.update(num_beams=6, length_penalty=0.7)
    there.save_pretrained(folder)
    return folder


def test_chosen_exits_that_were_not_trained_are_named(
    there: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_marian(str(there), tmp_path / "run")
    Translator.open(tmp_path / "run", device="cpu", name="choosing_exits", exits=(1, 3))
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "was not trained at exit 2-1; expect bad translations" in warning


SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("config.json", {name: value}) for name in SPECIAL_TOKENS for value in (None, 99_999)),
    *(
        ("config.json", {name: value})
        for name in ("encoder_layers", "d_model", "vocab_size")
        for value in (100_000, 1)
    ),
    ("config.json", {"eos_token_id": 0}),
    ("config.json", {"max_position_embeddings": 10**9}),
    ("config.json", {"model_type": ["marian"]}),
    ("vocab.json", {"<unk>": [3]}),
    ("vocab.json", {"another": 10**6}),
    *(("generation_config.json", {"num_beams": value}) for value in (0, 10**9, "6")),
    *(("generation_config.json", {"length_penalty": value}) for value in (-1.0, math.inf)),
]


def test_each_wrong_folder_is_refused_in_one_sentence(there: Path, tmp_path: Path) -> None:
    for name, changes in WRONG:
        folder = shutil.copytree(there, tmp_path / "there", dirs_exist_ok=True)
        (folder / name).write_text(json.dumps(json.loads((there / name).read_text()) | changes))
        with pytest.raises(ConfigError) as caught:
            import_marian(str(folder), tmp_path / "run")
        assert len(str(caught.value)) < 2000 and not (tmp_path / "run").exists(), (name, changes)
    os.mkfifo(folder / "generation_config2.json")
    with pytest.raises(ConfigError, match=r"generation_config2\.json is not a regular file"):
        import_marian(str(folder), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("model.decoder.layers.1.fc2.weight", math.nan, r"decoder\.layers\.1\.fc2\.weight .*NaN"),
        ("model.encoder.layers.9.fc2.weight", 1.0, r"no place for, among them .*encoder\.layers\.9\.fc2\.weight"),
    ],
)
def test_weights_that_are_not_finite_or_have_no_place_are_refused(
    name: str, number: float, message: str, there: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(there, tmp_path / "there")
    weights = load_file(folder / "model.safetensors")
    weights.setdefault(name, torch.ones(3)).view(-1)[-1] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        import_marian(str(folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_python_in_a_folder_is_not_run(there: Path, tmp_path: Path) -> None:
    folder, code = shutil.copytree(there, tmp_path / "there"), f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n"
    (folder / "evil.py").write_text(code + "class Evil: ...\n")
    kinds = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM", "AutoTokenizer")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = {kind: ["evil.Evil", None] if "Token" in kind else "evil.Evil" for kind in kinds}
        (folder / name).write_text(json.dumps(content))
    import_marian(str(folder), tmp_path / "run")
    assert (tmp_path / "run" / "config.yaml").exists()
    huggingface.load_translation_model(folder)
    config = json.loads((folder / "config.json").read_text())
    for model_type in ("evil", "bert"):
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        for load in (huggingface.load_shape, huggingface.load_vocabulary, huggingface.load_marian):
            with pytest.raises(ConfigError):
                load(str(folder), "--from")
        with pytest.raises(ConfigError):
            huggingface.load_translation_model(folder)
    assert not (tmp_path / "made").exists()
