"""The umask decides who can read a data directory, a run, its page, its translations and its exports."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deepspeed_nmt.cli import main
from tests.commands import pair_words
from tests.system.conftest import SMALL

RUN = [*SMALL, "training.max_updates=2", "training.validate_every=1", "training.log_every=1", "collapse.every=1"]


def test_all_files_and_directories_follow_the_umask(data: Path, tmp_path: Path) -> None:
    text, top = data.parent / "text", tmp_path / "all"
    run, directory, hypothesis = str(top / "run"), str(top / "data"), str(top / "test.de")
    source, target = str(text / "test.en"), str(text / "test.de")
    mask = 0o027  # group and others differ, and both from the modes that are usual
    before = os.umask(mask)
    try:
        top.mkdir()
        words = pair_words(text, train="train", valid="valid", test="test")
        assert main(["prepare", "--out", directory, "--vocab-size", "300", *words]) == 0
        train = ["train", "--recipe", "transformer_base", "--data", directory, "--run", run, *RUN]
        assert main([*train, "engine.name=plain"]) == 0
        assert main(["average", "--run", run, "--last", "2"]) == 0
        assert main(["translate", "--run", run, "--input", source, "--output", hypothesis, "--device", "cpu"]) == 0
        assert main(["report", "run", run, "--out", str(top / "page.html")]) == 0
        for format in ("ctranslate2", "huggingface"):
            out = ["--format", format, "--out", str(top / format), "--sentences", "4"]
            assert main(["export", "--run", run, *out, "--source", source, "--reference", target]) in (0, 1)
    finally:
        os.umask(before)
    paths = [top, *top.rglob("*")]
    wrong = {
        str(path.relative_to(top)): oct(mode)
        for path in paths
        if (mode := stat.S_IMODE(path.stat().st_mode)) != (0o777 if path.is_dir() else 0o666) & ~mask
    }
    assert not wrong and len(paths) > 60
    names = {path.relative_to(top).parts[:2] for path in paths}
    assert {("run", "tensorboard"), ("run", "checkpoints"), ("run", "logs"), ("run", "validation")} <= names
    assert {("huggingface", "model.safetensors"), ("ctranslate2", "model.bin"), ("page.html",)} <= names
