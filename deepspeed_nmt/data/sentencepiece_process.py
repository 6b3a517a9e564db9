"""Training of SentencePiece in a process of its own, which can be ended at any moment.

Called in this process, SentencePiece would delay a signal to its end, minutes later, or report it as an error of the
text. A thread cannot be ended.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import sentencepiece

_LENGTH_BYTES = 4


def train_model(lines: Iterable[str], **settings: Any) -> bytes:
    """Train a model.

    Args:
        lines: of text.
        settings: of SentencePiece.

    Returns:
        The serialised model.

    Raises:
        RuntimeError: if SentencePiece fails, with its message.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has failed, and says why
                process.stdin.write(json.dumps(settings).encode() + b"\n")
                for line in lines:
                    data = line.encode()
                    process.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            model, message = process.communicate()
        except BaseException:
            process.kill()
            with suppress(BrokenPipeError):  # of what is still to be flushed
                process.stdin.close()
            raise
    if process.returncode < 0:
        raise RuntimeError(f"killed by signal {-process.returncode}")
    if process.returncode > 0:
        raise RuntimeError(message.decode("utf-8", errors="replace").strip())
    return model


def _main() -> None:
    """Train as the new process: settings and lines on standard input, the model on standard output."""
    stdin, model = sys.stdin.buffer, io.BytesIO()
    settings = json.loads(stdin.readline())
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=_lines(stdin), model_writer=model, **settings)
    except RuntimeError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(model.getvalue())


def _lines(stream: BinaryIO) -> Iterator[str]:
    while length := stream.read(_LENGTH_BYTES):
        yield stream.read(int.from_bytes(length, "little")).decode()


if __name__ == "__main__":
    _main()
