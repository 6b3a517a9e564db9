"""Data directories of a run: their tags, what must be equal in all of them, and when a weight holds."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.mixture import Weight
from deepspeed_nmt.data.training import DataOption, TrainingData, _names
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm, plain_form

FRENCH, ENGLISH = TextForm("raw", "en", "fr"), TextForm("raw", "en", "en")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that opens directories without files, of one vocabulary, given the form and the tags of each."""

    def opened(*kinds: tuple[TextForm, Tags], tag: str | None = None) -> TrainingData:
        directories = {
            Path(f"/{number}"): SimpleNamespace(
                path=Path(f"/{number}"), fingerprint=str(number), vocabulary=1, text_form=form, tags=tags
            )
            for number, (form, tags) in enumerate(kinds)
        }
        monkeypatch.setattr(DataDirectory, "open", directories.__getitem__)
        return TrainingData([DataOption(path, tag=tag if path == Path("/1") else None) for path in directories])

    return opened


def test_tags_are_those_of_all_directories(data: Any) -> None:
    french, english = Tags(source="<2fr>"), Tags(source="<2en>")
    assert data((FRENCH, french), (FRENCH, french)).tags == french
    assert data((FRENCH, french)).tags == french
    assert data((FRENCH, french), (ENGLISH, english)).tags == NO_TAGS


def test_a_language_is_that_of_all_directories(data: Any) -> None:
    german, unnamed = TextForm("moses", "en", "de"), TextForm("moses", "en")
    french = replace(german, target_lang="fr")
    for forms, common in (
        ([german, unnamed], german), ([german, french], unnamed), ([german, TextForm("moses", "fr", "de")],
        TextForm("moses", None, "de")),
    ):  # fmt: skip
        assert data(*((form, Tags(source=f"<{n}>")) for n, form in enumerate(forms))).common_form == common
    with pytest.raises(ConfigError, match="its target language is not recorded; if Moses' tokenizer made it, give"):
        plain_form(unnamed, "", Path("run"))


def test_text_of_another_form_is_refused_and_of_another_language_needs_a_tag(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match="text of the form moses, but /0 raw; prepare them alike"):
        data((FRENCH, NO_TAGS), (TextForm("moses", "en", "fr"), NO_TAGS))
    logging.getLogger("deepspeed_nmt").propagate = True
    for kinds, tag, warns in (
        ([FRENCH, ENGLISH], None, True), ([FRENCH, ENGLISH], "<2en>", False), ([FRENCH, FRENCH], None, False),
    ):  # fmt: skip
        caplog.clear()
        data(*((form, NO_TAGS) for form in kinds), tag=tag)
        assert ("no tag tells them apart" in caplog.text) is warns


def test_corpora_have_different_names() -> None:
    assert _names([Path("/a/news"), Path("/b/crawl"), Path("/b/news")]) == ["news-1", "crawl", "news-2"]
    assert _names([Path("/a/news-1"), Path("/a/news"), Path("/b/news")]) == ["news-1", "news-2", "news-3"]


def test_a_weight_holds_from_its_first_update_to_its_last() -> None:
    held = [update for update in range(1, 9) if Weight(value=1.0, first=3, last=5).holds(update)]
    assert held == [3, 4, 5] and Weight(value=1.0).holds(1 << 40)
