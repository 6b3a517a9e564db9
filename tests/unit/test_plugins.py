"""Plug-ins that are refused, each in a sentence, and the hash of one."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import pytest

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods import LIKELIHOODS, REGULARIZERS, self_tests
from deepspeed_nmt.parity import methods, settings_of
from deepspeed_nmt.plugins import PLUGIN_API, PLUGINS, PLUGINS_VARIABLE, _digest, load_plugins

HEAD = f"""
from deepspeed_nmt.core.parts import RegularizerConfig
from deepspeed_nmt.registry import Config, Entry, SelfTest
PLUGIN_API = {PLUGIN_API}
"""
ENTRY = "Entry('{0}', RegularizerConfig, print)"


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("../broken", None, "'../broken', but there is no such module; install it"),
        ("no_such_module", None, "'no_such_module', but there is no such module; install it"),
        ("no_import", "import no_such_package", "no_import cannot be imported (ModuleNotFoundError: No module named"),
        ("no_syntax", "def", "no_syntax cannot be imported (SyntaxError"),
        ("exits", "raise SystemExit", "exits cannot be imported (SystemExit)"),
        ("no_version", "ENTRIES = []", "no_version has PLUGIN_API None, but this deepspeed_nmt has 1"),
        ("next_version", "PLUGIN_API = 2", "next_version has PLUGIN_API 2, but"),
        ("no_entries", HEAD, "no_entries has no list ENTRIES"),
        ("empty", f"{HEAD}ENTRIES = []", "empty has no list ENTRIES"),
        ("wrong", f"{HEAD}ENTRIES = [RegularizerConfig]", "wrong has no list ENTRIES"),
        ("kindless", f"{HEAD}ENTRIES = [Entry('x', Config, print)]", "Config extends none of ModelConfig, "),
        ("dotted", f"{HEAD}ENTRIES = [{ENTRY.format('a.b')}]", "has the regularizer 'a.b'; name it by letters"),
        ("twice", f"{HEAD}ENTRIES = 2 * [{ENTRY.format('x')}]", "has the regularizer x, but that name exists"),
        ("takes", f"{HEAD}ENTRIES = [{ENTRY.format('r_drop')}]", "has the regularizer r_drop, but that name exists"),
        (
            "likelihood",
            f"{HEAD}ENTRIES = [{ENTRY.format('label_smoothed')}]",
            "has the regularizer label_smoothed, but that name exists",
        ),
        (
            "case",
            f"{HEAD}ENTRIES = [Entry('x', RegularizerConfig, print, SelfTest('vanilla', {{}}))]",
            "has the SelfTest vanilla, but that name exists",
        ),
    ],
)
def test_a_plugin_is_refused(
    module: str, source: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source is not None:
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS_VARIABLE, f" ,{module}")
    before = [*LIKELIHOODS, *REGULARIZERS, *self_tests()]
    with pytest.raises(ConfigError) as refusal:
        load_plugins()
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)
    assert PLUGINS == {} and before == [*LIKELIHOODS, *REGULARIZERS, *self_tests()]


def test_an_entry_point_of_two_modules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("one", "two"):
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[deepspeed_nmt.methods]\nboth = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS_VARIABLE, "both")
    with pytest.raises(ConfigError, match="both, which is an entry point of one and two; name the module"):
        load_plugins()
    monkeypatch.setenv(PLUGINS_VARIABLE, "bth")
    with pytest.raises(ConfigError, match="did you mean 'both'"):
        load_plugins()


def test_the_hash_is_of_the_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hashed" / "parts").mkdir(parents=True)
    for name in ("hashed/__init__.py", "hashed/parts/layer.py", "hashed/method.py", "alone.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.syspath_prepend(tmp_path)

    def line(name: str, base: str = "hashed") -> str:
        return f"{hashlib.sha256((tmp_path / base / name).read_bytes()).hexdigest()}  {name}\n"

    output = line("__init__.py") + line("method.py") + line("parts/layer.py")
    expected = hashlib.sha256(output.encode()).hexdigest()
    assert _digest(importlib.import_module("hashed")) == _digest(importlib.import_module("hashed.method")) == expected
    alone = hashlib.sha256(line("alone.py", "").encode()).hexdigest()
    assert _digest(importlib.import_module("alone")) == alone


def test_selftest_of_one_method() -> None:
    assert methods(only="vanilla") == ["vanilla"]
    recurrent = methods(only="recurrent")
    assert recurrent and all(settings_of(case).model.name == "recurrent" for case in recurrent)
    assert all("ald" in settings_of(case).objective for case in methods(only="ald"))
    with pytest.raises(ConfigError, match="--only is 'recurent', which `selftest` does not know; did you mean"):
        methods(only="recurent")
