"""Models made of two BERTs: the numbers of `transformers`, and the structure of each decoder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.bert_tokenizer import BertTokenizer
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from tests.bert_equations import decoder_logits, sentences
from tests.berts import make_bert, transformers
from tests.support import batch_of

ENGLISH = ["the old house stands by the river", "a dog runs to the house", "the river is wide and old"] * 5
GERMAN = ["das alte haus steht am fluss", "ein hund läuft zum haus", "der fluss ist breit und alt"] * 5
PAPER = {
    "bert_scratch_transformer": 248,
    "bert_init_transformer": 200,
    "bert_coordinator": 329,
    "bert_serial": 172,
    "bert_parallel": 257,
    "bert_parallel_frozen": 171,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """BERTs of the source and of the target language, of different depth and vocabulary."""
    path = tmp_path_factory.mktemp("berts")
    return (
        make_bert(path / "de", GERMAN, seed=1, vocab_size=90, layers=3, num_attention_heads=2),
        make_bert(path / "en", ENGLISH, seed=2, vocab_size=80, layers=4),
    )


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> BertTokenizer:
    return BertTokenizer.from_berts(",".join(map(str, folders)))


def settings(folders: tuple[Path, Path]) -> list[str]:
    return [f"model.{side}_encoder={folder}" for side, folder in zip(("source", "target"), folders, strict=True)]


def loaded(recipe: str, folders: tuple[Path, Path], vocabulary: Vocabulary, *more: str) -> Any:
    """Return the model of a recipe with its BERTs' weights, in eval mode."""
    config = load_config(recipe, settings=[*settings(folders), *more]).resolved()
    model = build_model(config, vocabulary)
    assert model.load_pretrained() == config.model.model_dump().get("pretrained", True)
    return model.eval()


def batch(tokenizer: BertTokenizer) -> Batch:
    """Return a batch of two pairs of different lengths."""
    v = tokenizer.vocabulary
    sources = [[*each, v.source.eos] for each in tokenizer.encode_batch(["das alte haus", "ein hund"], "source")]
    targets = tokenizer.encode_batch(["the old house stands", "a dog"], "target")
    rows = [torch.tensor(each) for each in sources], [torch.tensor([v.bos, *each]) for each in targets]
    outputs = [torch.tensor([*each, v.eos]) for each in targets]
    padded = [torch.nn.utils.rnn.pad_sequence(each, True, v.pad) for each in (*rows, outputs)]
    return batch_of(*padded, ids=[7, 11], pad=v.pad)


def test_the_encoder_equals_the_bert_of_transformers(folders: tuple[Path, Path], tokenizer: BertTokenizer) -> None:
    model, data = loaded("bert_parallel", folders, tokenizer.vocabulary), batch(tokenizer)
    theirs = transformers.BertModel.from_pretrained(folders[0], add_pooling_layer=False).eval()
    mask = data.source_BS.ne(data.pad)
    with torch.no_grad():
        expected = theirs(data.source_BS, attention_mask=mask.long()).last_hidden_state
        found = model.encode(data.source_BS).states_BSD
    assert expected.std() > 0.5 and not mask.all()
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-5)


WHOLE = [
    *(("bert_parallel", f"model.fusion_scale={scale}") for scale in ("1", "0.5", "learned")),
    ("bert_serial",),
    ("bert_init_transformer",),
    ("bert_coordinator", "model.coordinator_layers=2"),
]


@pytest.mark.parametrize("settings", WHOLE, ids=" ".join)
def test_a_whole_decoder_follows_its_equations(settings: tuple[str, ...]) -> None:
    """In float64, with all sub-layers active: logits and gradients of a padded batch, against single sentences."""
    shape = {"dim": 12, "ffn_dim": 20, "positions": 16}
    sides = {"source": {**shape, "layers": 2, "heads": 2}, "target": {**shape, "layers": 4, "heads": 3}}
    config = load_config(settings[0], settings=[*settings[1:], *(f"model.{k}={v}" for k, v in sides.items())])
    vocabulary = Vocabulary(23, pad=0, bos=1, eos=2, unk=3, mask=4, own_source=Vocabulary(19, pad=0, bos=1, eos=2))
    model = build_model(config, vocabulary).double().eval().requires_grad_(True)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    source = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 2, 0, 0], [1, 9, 10, 2, 0]])
    target = torch.tensor([[1, 11, 0, 0], [1, 12, 13, 14], [1, 15, 16, 0]])
    found = model.projection(model.decode(target, model.encode(source))[0])
    rows = zip(sentences(source, 0), sentences(target, 0), strict=True)
    expected = torch.cat([decoder_logits(model, *row) for row in rows])
    torch.testing.assert_close(found[target.ne(0)], expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.5
    towards = torch.randn_like(expected)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (torch.autograd.grad((x * towards).sum(), parameters) for x in (found[target.ne(0)], expected))
    for name, ours, theirs in zip(names, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("recipe", "first", "second"),
    [
        ("bert_parallel", 1, 0),
        ("bert_serial", 2, 1),
        ("bert_init_transformer", 1, None),
        ("bert_coordinator", 1, None),
    ],
)
def test_a_decoder_layer_has_the_weights_of_its_bert_layers(
    recipe: str, first: int, second: int | None, folders: tuple[Path, Path], tokenizer: BertTokenizer
) -> None:
    """Layer n has layer ``first`` n as its encoding sub-layer, and that plus ``second`` as its fusion sub-layer."""
    model = loaded(recipe, folders, tokenizer.vocabulary, "model.coordinator_layers=2")
    weights = transformers.BertForMaskedLM.from_pretrained(folders[1]).state_dict()
    attention = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "out_proj": "output.dense"}
    network = {"up_proj": "intermediate.dense", "down_proj": "output.dense"}

    def check(layer: Any, number: int, attending: str, feeding: str) -> None:
        prefix = f"bert.encoder.layer.{number}"
        names = {f"{attending}_attention.{ours}": f"{prefix}.attention.{hf}" for ours, hf in attention.items()}
        names |= {f"{feeding}.{ours}": f"{prefix}.{hf}" for ours, hf in network.items()}
        names[f"{attending}_residual.norm"] = f"{prefix}.attention.output.LayerNorm"
        names[f"{feeding}_residual.norm"] = f"{prefix}.output.LayerNorm"
        for ours, theirs in names.items():
            for name, parameter in layer.get_submodule(ours).named_parameters():
                assert torch.equal(parameter, weights[f"{theirs}.{name}"]), (ours, name)

    layers = list(model.decoder.layers)[: 4 // first]
    assert len(layers) == 4 // first and len(model.decoder.layers) == len(layers) + 2 * (recipe == "bert_coordinator")
    for number, layer in enumerate(layers):
        check(layer, first * number, "self", "feed_forward")
        if second is not None:
            check(layer, first * number + second, "cross", "fusion")
    words = weights["bert.embeddings.word_embeddings.weight"][: tokenizer.vocabulary.size]
    assert torch.equal(model.target_embedding.weight, words) and torch.equal(model.projection.weight, words)
    assert (model.projection.weight is model.target_embedding.weight) == (recipe != "bert_coordinator")


def test_other_fusion_scales_are_named_in_a_warm_start() -> None:
    plain, half = (load_config("bert_parallel", settings=[f"model.fusion_scale={scale}"]).model for scale in (1, 0.5))
    half.check_shape_of(plain, "RUN")
    assert half.composition_differences(plain) == ["model.fusion_scale is 1.0 there and 0.5 here"]
    frozen = load_config("bert_parallel_frozen").model
    frozen.check_shape_of(plain, "RUN")
    assert not frozen.composition_differences(plain)
    with pytest.raises(ConfigError, match=r"the model is not that of RUN: model.target is .* and .* here"):
        load_config("bert_parallel", settings=["model.target.heads=6"]).model.check_shape_of(plain, "RUN")


@pytest.mark.parametrize("recipe", PAPER)
def test_parameter_counts_are_those_of_the_paper(recipe: str) -> None:
    """The BERTs are of bert-base size. The paper also counts their poolers, which no translation model uses."""
    config = load_config(recipe)
    with torch.device("meta"):
        model = build_model(config, Vocabulary(30522, own_source=Vocabulary(31102)))
    pooler = 768 * 768 + 768
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) + 2 * pooler
    assert abs(trained / 1e6 / PAPER[recipe] - 1.0) < 0.006


def test_parts_can_be_frozen_in_any_combination(folders: tuple[Path, Path], tokenizer: BertTokenizer) -> None:
    def trained(recipe: str, *parts: str) -> set[str]:
        model = loaded(recipe, folders, tokenizer.vocabulary, f"model.freeze=[{','.join(parts)}]")
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    everything = trained("bert_parallel")
    gone = {part: everything - trained("bert_parallel", part) for part in ("encoding", "embeddings", "encoder")}
    assert all(name.startswith("encoder.layers") for name in gone["encoder"]) and len(gone["encoder"]) == 3 * 15
    assert {name.split(".")[0] for name in gone["embeddings"]} == {"source_embedding", "target_embedding"}
    inside = ("self_attention", "self_residual", "feed_forward", "feed_forward_residual")
    assert {name.split(".")[3] for name in gone["encoding"]} == set(inside) and len(gone["encoding"]) == 4 * 15
    assert everything - trained("bert_parallel", "encoding", "encoder") == gone["encoding"] | gone["encoder"]
    coordinator = trained("bert_coordinator", "encoding")
    assert {name.split(".")[2] for name in coordinator if name.startswith("decoder.layers")} == {
        str(n) for n in range(4, 16)
    }


def test_a_bert_without_a_head_gets_a_random_one(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_bert(tmp_path / "plain", ENGLISH, seed=4, vocab_size=80, head=False)
    vocabulary = BertTokenizer.from_berts(f"{folders[0]},{plain}").vocabulary
    model = loaded("bert_parallel", (folders[0], plain), vocabulary)
    assert torch.equal(model.projection.bias, torch.zeros(vocabulary.size))
    with pytest.raises(ConfigError, match="saved without its language-model head"):
        loaded("abnet_serial", (folders[0], plain), vocabulary)


def test_unusable_berts_are_named(
    folders: tuple[Path, Path], tokenizer: BertTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders

    def fails(*folders: Path | str, vocabulary: Vocabulary = tokenizer.vocabulary) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded("bert_parallel", folders, vocabulary)  # type: ignore[arg-type]
        return str(caught.value)

    assert "there is no folder /nowhere/bert" in fails(source, "/nowhere/bert")
    (tmp_path / "other").mkdir()
    transformers.RobertaConfig(hidden_size=32).save_pretrained(tmp_path / "other")
    assert "model_type=roberta" in fails(source, tmp_path / "other")
    message = fails(source, target, vocabulary=Vocabulary(99, own_source=tokenizer.vocabulary.source))
    assert "the data 99" in message
    weights = source.parent / "cut"
    weights.mkdir()
    for file in source.iterdir():
        (weights / file.name).write_bytes(file.read_bytes()[: -100 if file.suffix == ".safetensors" else None])
    assert "the weights of a BERT could not be loaded" in fails(weights, target)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert "the package transformers" in fails(source, target)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bert_parallel", "layer.name=cross_attention_drop"], "makes layers of a Transformer"),
        (["", "search.name=mask_predict"], "decodes models that guess masked tokens, but model.name=transformer"),
        (["bert_scratch_transformer", "model.freeze=[encoder]"], "freeze is ['encoder'], but with pretrained=false"),
        (["bert_serial", "model.target.layers=3"], "an even number of layers"),
        (["bert_serial", "model.fusion_scale=0.5"], "fusion_scale is 0.5, but decoder=serial"),
        (["abnet_serial", "model.cross_heads=5"], "cross_heads is 5, which does not divide target.dim"),
        (["abnet_serial", "objective.ddr.weight=1"], "guesses masked tokens; set objective.ddr to null"),
    ],
)
def test_incompatible_settings_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(words[0] or None, settings=words[1:])
    assert message in str(caught.value)


def test_a_run_resumes_without_its_berts(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    """The shapes of the BERTs are in the run's configuration."""
    moved = (copy(folders[0], tmp_path), copy(folders[1], tmp_path))
    begun = load_config("bert_parallel", settings=settings(moved)).resolved()
    for folder in moved:
        shutil.rmtree(folder)
    again = load_config("bert_parallel", settings=[*settings(moved), "model.freeze=[]"])
    found = again.resolved(begun).model.model_dump()
    assert found == {**begun.model.model_dump(), "freeze": ()}, (
        "resolved() keeps changed settings; other checks refuse them"
    )
    with pytest.raises(ConfigError, match="there is no folder"):
        again.resolved()


def copy(folder: Path, into: Path) -> Path:
    return Path(shutil.copytree(folder, into / f"copy of {folder.name}"))


def test_beam_search_never_predicts_a_mask(folders: tuple[Path, Path], tokenizer: BertTokenizer) -> None:
    model = loaded("bert_parallel", folders, tokenizer.vocabulary)
    with torch.no_grad():
        model.projection.bias[tokenizer.vocabulary.mask] = 100.0
    v = tokenizer.vocabulary
    source = torch.tensor([[*tokenizer.encode("das alte haus"), v.source.eos]])
    for each in (model, model.at_exit("3-4")):
        for hypothesis in BeamSearch(BeamConfig(beam=3), each, v).search(source)[0]:
            assert v.mask not in hypothesis.tokens
