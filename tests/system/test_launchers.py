"""Launchers, called as documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, free_port


def test_torchrun_as_documented(data: Path, small: list[str], tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^torchrun .* train .*$", (ROOT / "docs/launch.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = line.split()
    for word, replacement in (("DATA", str(data)), ("RUN", str(tmp_path / "run")), ("8", "2")):
        words[words.index(word)] = replacement
    words[words.index("transformer_big")] = "transformer_base"
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()), *words[1:]]
    done = subprocess.run(
        [*command, *small, "training.max_updates=2", "engine.name=plain", "validation.metrics=[]"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 x cpu" in done.stderr and "done: 2 updates" in done.stderr
