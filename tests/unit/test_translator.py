"""The Python API: settings of the search, details of translations, ensembles, and threads."""

import copy
import math
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.native import library as native
from deepspeed_nmt.run.opening import Opened, search_settings
from deepspeed_nmt.search.beam import BeamConfig
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.models import Ensemble, prepare_to_decode
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.text import NO_TAGS, Tags, text_of

V = Vocabulary(30)
LINES = ["hello", "a", "translation", "", "deep", "zz", "longer", "b", "model"] * 3


class Letters:
    """Tokenizer with the letters of the alphabet as tokens from 4 up, and a word of one letter each."""

    vocabulary = V

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text], "source")[0]

    def encode_batch(self, texts: Sequence[str], side: str) -> list[list[int]]:
        return [
            [4 + ord(each) - ord("a") if each.isalpha() else 3 for each in text.replace(" ", "")] for text in texts
        ]

    def reference(self, text: str) -> str:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(chr(ord("a") + token - 4) for token in tokens)


def plain(seed: int) -> TranslationModel:
    torch.manual_seed(seed)
    config = TransformerConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=2, decoder_layers=2, share_embeddings="none"
    )
    model = build_transformer(config, V)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    return model.eval()


def opened(search: SearchConfig | None = None, *seeds: int, **how: Any) -> Translator:
    models = [plain(seed) for seed in seeds or (1,)]
    model = models[0] if len(models) == 1 else Ensemble(models, how.pop("weights", None)).eval()
    return Translator(model, Letters(), search or BeamConfig(beam=3), torch.device("cpu"), **how)  # type: ignore[arg-type]


def config(name: str, **settings: Any) -> SearchConfig:
    found = SEARCHES[name].config.model_validate({"name": name, **settings})
    assert isinstance(found, SearchConfig)
    return found


def test_a_translation_begins_with_its_prefix_and_contains_its_constraints() -> None:
    prefix = ["qu", "", "v"] * 9
    free = opened().translate(LINES)
    found = opened().translate(LINES, prefix=iter(prefix), max_tokens=30)
    for line, begin, each, other in zip(LINES, prefix, found, free, strict=True):
        assert each.text.replace(" ", "").startswith(begin) or not line
        assert begin or each.tokens == other.tokens
    constraints = [["kx", " "], [], ["j"]] * 9
    both = opened(config("constrained_beam", beam=4)).translate(LINES, prefix=prefix, constraints=constraints)
    for line, begin, phrases, each in zip(LINES, prefix, constraints, both, strict=True):
        text = each.text.replace(" ", "")
        assert not line or (text.startswith(begin) and all(phrase.strip() in text for phrase in phrases))


@pytest.mark.parametrize("prefix", [None, ["q"] * len(LINES)])
def test_the_tag_of_a_target_does_not_count_in_the_length(prefix: list[str] | None) -> None:
    search = config("sampling", samples=1, min_length=5, max_length=5)
    for tags in (NO_TAGS, Tags(target="z")):
        found = opened(search, tags=tags).translate(LINES, prefix=prefix)
        assert {len(each.text.replace(" ", "")) for each in found if each.text} == {4}, "four tokens and EOS"


def test_a_line_without_words_stays_empty_behind_a_tag() -> None:
    class Normalising(Letters):
        def encode_batch(self, texts: Sequence[str], side: str) -> list[list[int]]:
            return super().encode_batch([text.replace("\u200b", "") for text in texts], side)

    model = plain(1)
    for tags in (NO_TAGS, Tags(source="z")):
        translator = Translator(model, Normalising(), BeamConfig(beam=3), torch.device("cpu"), tags=tags)  # type: ignore[arg-type]
        found = [each.text for each in translator.translate(["ab", "\u200b", "", "c"])]
        assert found[1:3] == ["", ""] and found[0] and found[3]


def test_translate_returns_as_many_translations_as_are_asked_for() -> None:
    translator = opened()
    best = [each.text for each in translator.translate(LINES)]
    lists = translator.translate(LINES, nbest=3, max_source_tokens=9)
    assert [each[0].text for each in lists] == best
    assert {len(each) for line, each in zip(LINES, lists, strict=True) if line} == {3}
    assert [[each.text for each in one] for one in translator.translate(LINES, nbest=1)] == [[each] for each in best]
    with pytest.raises(ConfigError, match="`nbest` is 4"):
        translator.translate(LINES, nbest=4)


def test_samples_depend_on_the_number_of_the_line_alone() -> None:
    search = config("sampling", samples=2, seed=4)
    texts = [[each.text for each in best] for best in opened(search).stream(LINES, nbest=2)]
    assert texts[0] != texts[9] != texts[18], "the same sentence on three lines"
    for options in ({"max_tokens": 1}, {"buffer_lines": 2}, {"max_tokens": 25, "buffer_lines": 5}):
        again = opened(search).stream(LINES, nbest=2, **options)  # type: ignore[arg-type]
        assert [[each.text for each in best] for best in again] == texts
    rest = opened(search).stream(LINES[7:], nbest=2, first_line=7)
    assert [[each.text for each in best] for best in rest] == texts[7:]


@pytest.mark.parametrize("fewer", ["prefix", "source"])
def test_a_text_of_another_length_loses_no_translation(fewer: str) -> None:
    expected = [each.text for each in opened().translate(LINES[:5])]
    prefix, lines = [""] * (5 if fewer == "prefix" else 20), LINES[:5] if fewer == "source" else LINES

    def texts() -> Iterator[str]:
        for best in opened().stream(lines, prefix=prefix, buffer_lines=4):
            yield best[0].text

    found = []
    message = r"`prefix` has (5 lines, and the source has more|more lines, and)"
    with pytest.raises(DataError, match=message):
        for text in texts():
            found.append(text)
    assert found == expected


def test_a_prefix_must_fit_the_model() -> None:
    translator = opened()
    translator.model.longest_target = 6
    found = []
    with pytest.raises(DataError, match="line 2 have 6 tokens, more than 5"):
        for best in translator.stream(["ab", "cd", "ef"], prefix=["abcde", "abcdef", ""]):
            found.append(best[0].text)
    assert found == ["a b c d e"]


def test_scores_of_tokens_and_alignments() -> None:
    found = opened().translate(LINES, token_scores=True, alignment=True, alignment_layer=2, max_tokens=40)
    plainly = opened().translate(LINES)
    for line, each, other in zip(LINES, found, plainly, strict=True):
        assert (each.text, each.tokens) == (
            other.text,
            other.tokens,
        ) and other.token_scores is other.alignment is None
        assert each.token_scores is not None and each.alignment is not None
        assert len(each.token_scores) == (len(each.tokens) + 1 if line else 0)
        assert math.fsum(each.token_scores) == pytest.approx(each.log_prob, abs=1e-4)
        assert [word for _, word in sorted(each.alignment, key=lambda pair: pair[1])] == list(range(len(each.tokens)))
        assert all(source == 0 for source, _ in each.alignment), "each source is one word"
    (one,) = opened().translate(["h e l l o"], alignment=True, alignment_layer=1)
    assert one.alignment is not None and {source for source, _ in one.alignment} <= set(range(5))


def test_the_top_of_an_exit_aligns_as_the_exit() -> None:
    aligning = {"top": [2], "1-1": [1]}
    whole = opened(opened=Opened((), "best", "top", aligning=aligning))
    shallow = whole.at_exit("1-1").at_exit("top")
    (one,), (other,) = (
        [each.alignment for each in of.translate(["h e l l o"], alignment=True)]
        for of in (whole.at_exit("1-1"), shallow)
    )
    assert one == other
    with pytest.raises(ConfigError, match="`name` is 1; give the name of an exit"):
        whole.at_exit(1)  # type: ignore[arg-type]


def test_scores_of_a_damaged_model_are_refused() -> None:
    translator = opened()
    torch.nn.init.constant_(next(translator.model.parameters()), torch.nan)
    for options in ({}, {"reliance": True}):
        with pytest.raises(CheckpointError, match="predicts NaN or infinity"):
            list(translator.score(LINES, LINES, **options))


def test_weights_of_an_ensemble() -> None:
    pairs = (LINES, [each.text or "a" for each in opened(None, 2).translate(LINES)])
    scores = [[each.log_probs for each in opened(None, seed).score(*pairs)] for seed in (1, 2)]
    for weights, shares in (([3.0, 1.0], (0.75, 0.25)), (None, (0.5, 0.5))):
        mixed = opened(None, 1, 2, weights=weights)
        for one, two, found in zip(*scores, mixed.score(*pairs), strict=True):
            both = zip(one, two, strict=True)
            means = [math.log(shares[0] * math.exp(a) + shares[1] * math.exp(b)) for a, b in both]
            assert found.log_probs == pytest.approx(means, abs=1e-4)
        for best in mixed.stream(LINES[:3], token_scores=True):
            assert math.fsum(best[0].token_scores or ()) == pytest.approx(best[0].log_prob, abs=1e-4)
    almost = opened(None, 1, 2, weights=[1.0, 1e-9])
    assert [each.tokens for each in almost.translate(LINES)] == [each.tokens for each in opened().translate(LINES)]
    exits = mixed.at_exit("1-1")
    assert isinstance(exits.model, Ensemble) and mixed.at_exit("top").model is not exits.model
    assert exits.exits == ["top"] and exits._lock is mixed._lock


def test_a_deep_copy_has_weights_and_threads_of_its_own() -> None:
    translator = opened()
    before = [each.text for each in translator.translate(LINES)]
    other = copy.deepcopy(translator)
    assert [each.text for each in other.translate(LINES)] == before and other._lock is not translator._lock
    for parameter in other.model.parameters():
        torch.nn.init.zeros_(parameter)
    assert [each.text for each in translator.translate(LINES)] == before


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    translator, x = opened(), torch.ones(4000, 64)
    prepare_to_decode(translator.model, translator.device, "fp32")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.nn.functional.layer_norm(x, (64,))
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            torch.nn.functional.layer_norm(x, (64,))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sampling", "constrained_beam"])
def test_threads_translate_as_one(name: str) -> None:
    """The threads read ahead and write by turns; a model used by two at once would mix up its states."""
    translator = opened(config(name))
    shallow = translator.at_exit("1-1")

    def work(number: int) -> list[list[Any]]:
        each = shallow if number % 2 else translator
        details = each.stream(LINES, token_scores=True, alignment=True, alignment_layer=1, max_tokens=8 + number)
        scores = each.score(LINES, LINES, max_tokens=20)
        return [
            [(best[0].text, best[0].alignment) for best in details],
            [round(scored.log_prob, 3) for scored in scores],
        ]

    expected = [work(0), work(1)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(12)))
    assert [each[0] for each in found] == [expected[number % 2][0] for number in range(12)]
    for number, each in enumerate(found):
        assert each[1] == pytest.approx(expected[number % 2][1], abs=2e-3)


@pytest.mark.parametrize(
    ("search", "options", "named"),
    [
        ("beam", {"constraints": [["a"]]}, "`constraints` constrained_beam"),
        ("mask_predict", {"prefix": ["a"]}, "`prefix` mask_predict"),
        ("mask_predict", {"reliance": True}, "`reliance` masked tokens"),
        ("beam", {"reliance": "F"}, "`reliance` 'F' True or False"),
        ("beam", {"alignment_layer": 1}, "`alignment_layer` `alignment`"),
        ("beam", {"alignment": True}, "`alignment_layer`"),
        ("beam", {"prefix": "a"}, "`prefix` string"),
        ("beam", {"sentences": "Dog."}, "`sentences` string"),
        ("constrained_beam", {"constraints": ["a b"]}, "`constraints` 'a b'"),
        ("beam", {"sentences": ["a\udcff"]}, "`sentences` surrogate"),
        ("beam", {"first_line": 2**70}, "`first_line` 1180591620717411303424"),
        ("sampling", {"nbest": 2}, "`nbest` 2 `samples` 1"),
    ],
)
def test_what_excludes_one_another_is_refused(search: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(opened(config(search)).stream(**{"sentences": ["a"], **options}))
    assert all(word in str(error.value) for word in named.split())


def test_text_in_place_of_a_list_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="`suppress` is 'the'; give a list"):
        DecodeOptions.of({"suppress": "the"})


@pytest.mark.parametrize("name", ["beam", "max_length", "search", "tag", "output"])
def test_an_option_of_another_call_is_refused_and_not_ignored(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'.*`Translator.open`"):
        opened().translate(["a"], **{name: 1})
    with pytest.raises(TypeError, match="'nbest'"):
        opened().score(["a"], ["b"], nbest=1)


@dataclass
class StubRun:
    """A run that has settings alone."""

    config: RunConfig
    path: Path = Path("run")


class TopRun(StubRun):
    """A run that has trained its top alone."""

    def trained_at(self, exit: str, stages: tuple[int, int]) -> bool:
        return False


def test_runs_whose_exits_have_other_names_share_the_top() -> None:
    grown: Any = StubRun(load_config("depth_growing_base_8"))
    other: Any = TopRun(load_config("transformer_base"))
    models = [plain(1), plain(2)]
    for runs in ((grown, other), (other, grown)):
        assert Opened(runs, "best", "top").exits(models) == ["top"]
    assert Opened((grown, grown), "best", "top").exits(models) == ["shallow", "deep"]
    assert Opened((grown, grown), "best", "shallow").exits(models) == ["shallow"]


def refusal(recipe: str, changes: dict[str, Any], *exits: str, settings: tuple[str, ...] = ()) -> str:
    run: Any = StubRun(load_config(recipe, settings=settings))
    with pytest.raises(ConfigError) as error:
        search_settings([run], changes, exits)
    return str(error.value)


def test_an_option_of_another_search_is_refused_by_name() -> None:
    end = "which decodes here, but of "
    assert refusal("transformer_base", {"alpha": 0.5}).endswith(f"search.name=beam, {end}deep_shallow; leave it out")
    assert "search.name=mask_predict, which decodes here" in refusal("abnet_serial", {"beam": 4})
    assert refusal("depth_growing_big_8", {"alpha": 0.5}, "exit").endswith(f"{end}deep_shallow; leave it out")
    needs = "needs a model with the exits deep and shallow, but model.name=transformer"
    assert needs in refusal("transformer_base", {"name": "deep_shallow"})
    both = "search.name=choosing_exits decodes from several exits, and `exit` chooses one; give one of them"
    assert refusal("transformer_base", {"name": "choosing_exits"}, "exit") == both


def test_a_chosen_exit_is_decoded_although_the_run_chooses_among_several() -> None:
    run: Any = StubRun(
        load_config(
            "transformer_base", settings=("search.name=choosing_exits", "search.exits=[1,2]", "search.beam=7")
        )
    )
    search = search_settings([run], {}, ["exit"])
    assert isinstance(search, BeamConfig) and search.beam == 7
    exits = {"exits": (1, 2), "beam": 3}
    found, expected = (
        [each.score for each in opened(each).at_exit("2-2").translate(LINES)]
        for each in (config("choosing_exits", **exits), BeamConfig(beam=3))
    )
    assert found == expected


@pytest.mark.parametrize("name", ["encoder_layers", "decoder_layers"])
def test_no_layers_are_not_all(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        DecodeOptions.of({name: 0})


@pytest.mark.parametrize("name", ["beam", "constrained_beam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_tensors_of_a_program_change_nothing(name: str, dtype: torch.dtype) -> None:
    translator = opened(config(name))
    prepare_to_decode(translator.model, translator.device, "fp32", native.obstacle() is None)
    expected = [(each.text, each.score) for each in translator.translate(LINES)]
    torch.set_default_dtype(dtype)
    try:
        assert [(each.text, each.score) for each in translator.translate(LINES)] == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_damaged_target_is_named_and_refused_behind_a_tag(caplog: pytest.LogCaptureFixture) -> None:
    targets = [text_of(b"ab"), text_of(b"c\xff")]
    for tags in (Tags(), Tags(target="z")):
        caplog.clear()
        assert len(list(opened(tags=tags).score(["a", "b"], targets))) == 2
        assert "line 2 of the translations has bytes that are not UTF-8" in caplog.text
        with pytest.raises(DataError, match="line 2 of the translations is not UTF-8"):
            list(opened(tags=tags).score(["a", "b"], targets, strict=True))


def test_pairs_are_read_from_where_standard_input_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_text("ab\ncd\n")
    (tmp_path / "target").write_text("a header\nab\nx\n")
    monkeypatch.setattr(Translator, "opened", lambda *_: opened())
    scores = []
    for begin in (0, len("a header\n")):
        (tmp_path / "whole").write_bytes((tmp_path / "target").read_bytes()[len("a header\n") - begin :])
        with (tmp_path / "whole").open() as stream:
            stream.buffer.seek(begin)
            monkeypatch.setattr("sys.stdin", stream)
            words = ["score-pairs", "--run", "R", "--source", str(tmp_path / "source"), "--target", "-"]
            assert main([*words, "--output", str(tmp_path / "scores")]) == 0
        scores.append((tmp_path / "scores").read_text())
    assert scores[0] == scores[1] and len(scores[0].splitlines()) == 2


@pytest.mark.parametrize("side", ["source", "target"])
def test_strict_pairs_are_checked_before_any_is_scored(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_bytes(b"ab\nc\xff\n" if name == side else b"ab\ncd\n")
    monkeypatch.setattr(Translator, "opened", lambda *_: opened())
    monkeypatch.setattr(Translator, "score", lambda *_, **__: pytest.fail("it was scored"))
    words = ["score-pairs", "--run", "R", "--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    assert main([*words, "--strict"]) == 2
    assert f"line 2 of the {'translations' if side == 'target' else 'source'} is not UTF-8" in capsys.readouterr().err
