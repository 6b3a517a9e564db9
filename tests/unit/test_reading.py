"""Settings in YAML that are ambiguous or huge are refused with a sentence, at once."""

from pathlib import Path

import pytest
import yaml

from deepspeed_nmt.config import load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.recipes.reading import parse_yaml, read_yaml


def problems(text: str) -> list[str]:
    """The sentences that a text is refused with."""
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "F")
    return caught.value.problems


def test_duplicate_keys_are_refused() -> None:
    assert problems("model:\n  dim: 32\n  heads: 2\n  dim: 64\n  'heads': 4\n") == [
        "F has the key 'dim' more than once; remove one", "F has the key 'heads' more than once; remove one",
    ]  # fmt: skip
    assert problems("a: [{b: 1, b: 2}]")


@pytest.mark.parametrize("text", ["model: &a\n  x: *a\n", "&a [*a]", "a: &a {x: 1}\nb: {<<: [*a, *a]}"])
def test_aliases_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"an alias, which settings cannot have in line"):
        read_yaml(tmp_path / "f.yaml")
    with pytest.raises(ConfigError):
        load_config(settings=[f"model={text}"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "1" + "}" * 3000, "- " * 3000])
def test_deep_settings_are_refused(text: str) -> None:
    assert problems(text) == ["F is too large or too deep for settings; give only what differs from the defaults"]
    with pytest.raises(ConfigError):
        load_config(settings=[f"model={text}"])


def test_a_file_that_does_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero is too large"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize("value", ["!!bool x", "!!timestamp x", "!!float x", "!!python/name:os.system"])
def test_tags_that_do_not_fit_are_no_yaml(value: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(value, "F")
    (tmp_path / "f.yaml").write_text(f"model: {{dim: {value}}}")
    with pytest.raises(ConfigError, match=r"f\.yaml must be a YAML file, but cannot be read"):
        read_yaml(tmp_path / "f.yaml")


def test_values_are_what_settings_need() -> None:
    text = '{1: 7e-4, two: "0.5", folder: 2024-99-99, digits: "0012", large: 99999999999999999999, hex: 0x10, no: no}'
    assert parse_yaml(text, "F") == {
        "1": 7e-4,
        "two": 0.5,
        "folder": "2024-99-99",
        "digits": "0012",
        "large": "99999999999999999999",
        "hex": 16,
        "False": False,
    }
    assert parse_yaml("9" * 5000, "F") == "9" * 5000
    assert parse_yaml("", "F") is None


@pytest.mark.parametrize("name", ["bert_parallel", "deep_decoder_big_54", "multi_softmax_base_2x2"])
def test_the_settings_of_a_run_are_written_without_aliases(name: str) -> None:
    assert "&" not in load_config(name).to_yaml()
