"""Commands do not wait for libraries that they do not need: each runs in a process of its own, which lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import pair_words
from tests.support import ROOT

LIST_MODULES = """
import runpy, sys
sys.argv = ["deepspeed_nmt", *sys.argv[1:]]
try:
    runpy.run_module("deepspeed_nmt", run_name="__main__", alter_sys=True)
except SystemExit as end:
    sys.stderr.write("\\nmodules " + " ".join(sys.modules))
    raise
"""
COMPILER = {"torch._dynamo", "torch._inductor", "sympy", "triton"}
TRAINING = {"deepspeed", "transformers", "pandas", "tensorboard", "torch.utils.tensorboard", "sacrebleu", *COMPILER}
LIBRARIES = {"torch", "numpy", "pydantic", "sentencepiece", "yaml", "matplotlib", "safetensors", *TRAINING}


def modules_of(*words: str) -> set[str]:
    """Run a command, and return the modules that it has imported."""
    done = subprocess.run([sys.executable, "-c", LIST_MODULES, *words], cwd=ROOT, capture_output=True, text=True)
    output, _, listed = done.stderr.rpartition("\nmodules ")
    assert done.returncode == 0, output
    return set(listed.split())


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A run of two updates, and the modules that the training has imported."""
    run = tmp_path_factory.mktemp("imports") / "run"
    shape = ["model.dim=32", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"]
    short = ["training.max_updates=2", "batch.update_tokens=500", "collapse.every=0", "engine.device=cpu"]
    unvalidated = ["validation.metrics=[]"]
    words = ["train", "--data", str(data), "--run", str(run), *shape, *short, *unvalidated]
    return run, modules_of(*words)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--help"], set()),
        (["train", "--help"], set()),
        (["sample-data", "--train", "1", "--valid", "1", "--test", "1", "--out", "OUT"], set()),
        (["score", "--hypothesis", "TEXT", "--reference", "TEXT"], {"numpy", "sacrebleu"}),
        (["plan", "--sweep", "deep_decoder_fig1", "--point", "3"], {"yaml"}),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_command_without_a_model(words: list[str], needed: set[str], data: Path, tmp_path: Path) -> None:
    paths = {"TEXT": str(data.parent / "text" / "test.de"), "OUT": str(tmp_path)}
    assert modules_of(*(paths.get(word, word) for word in words)) & LIBRARIES == needed


def test_prepare_with_sentencepiece_does_not_import_torch(data: Path, tmp_path: Path) -> None:
    files = pair_words(data.parent / "text", train="train", valid="valid")
    found = modules_of("prepare", *files, "--vocab-size", "300", "--out", str(tmp_path / "data"))
    assert found & LIBRARIES == {"numpy", "pydantic", "sentencepiece"}


def test_translation_imports_nothing_that_only_training_needs(trained: tuple[Path, set[str]], data: Path) -> None:
    text = str(data.parent / "text" / "test.en")
    found = modules_of("translate", "--run", str(trained[0]), "--device", "cpu", "--input", text, "--output", "-")
    assert found & LIBRARIES == {"torch", "numpy", "pydantic", "sentencepiece", "yaml", "safetensors"}


def test_training_with_plain_torch_does_not_import_deepspeed(trained: tuple[Path, set[str]]) -> None:
    assert trained[1] & {"deepspeed", "transformers", "pandas", "matplotlib"} == set()
