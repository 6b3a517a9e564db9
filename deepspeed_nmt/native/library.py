"""The native code of encoding and decoding on a CPU: built at its first use on a machine, called with tensors.

`layers.cpp` is compiled by the compiler that is there, for the vectors of this CPU. The library is kept in a
directory of this user alone, under a name that is a hash of source, compiler and flags, and ends in a hash of its
content. Without a compiler, or where no such directory can be made, there is no native code, and torch decodes.

The code starts no threads, and has no state. Rows and sentences are shared among as many threads as torch uses.

Legend: B sentences, K beam, R rows, T target length, V vocabulary, D model width, E outputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ctypes import c_double, c_float, c_int64, c_void_p
from functools import cache
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import atomic_write_bytes, read_regular
from deepspeed_nmt.native import structures

FEW_ROWS = 16
"""Rows up to which the products are faster than oneDNN's in any case."""
_SOURCE = Path(__file__).with_name("layers.cpp")
_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-Wno-psabi", "-O3", "-fopenmp-simd", "-ffp-contract=fast")
_FLAG_OF_GCC = "-fno-tree-pre"
"""Without it GCC keeps the sums of products in memory. Clang refuses it, and does not."""
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
CAPABILITIES = {
    "AVX512_VNNI": (*_AVX512, "-mavx512vnni"),
    "AVX512": _AVX512,
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}
"""Flags of the compiler by what a CPU has; vectors of other CPUs are the compiler's default."""
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_S = 300.0
"""Seconds after which a compiler is given up."""
_GROUP, _OFFSET = 4, 128
"""Inputs of an output that are adjacent in int8, and what is added to weights, as in the code."""
_MOST_INPUTS = 1 << 17
"""Inputs of a product in int8 up to which no sum is beyond 32 bits."""
_WIDE = 16
"""Outputs of a panel of AVX2's vectors."""
_CHUNK, _LINE = 1 << 25, 64
"""Least bytes for weights that are taken from the system at once, and of what each of them begins at a multiple."""
ROWS_OF_A_THREAD = 16
"""Rows of a step or a product for which it pays to wake a thread."""


class NativeError(Exception):
    """The reason why there is no native code here; a clause."""


class Extended(NamedTuple):
    """Rows that end, and their log-probabilities, EOS included; those that live on, and what they are extended to."""

    ended: list[int]
    ended_log_probs: list[float]
    row_BK: Tensor
    tokens_BKT: Tensor
    log_prob_BKT: Tensor


class Found:
    """Buffers for the extensions of B sentences with K hypotheses each.

    Attributes:
        row_BK: rows that live on.
    """

    def __init__(self, sentences: int, beam: int) -> None:
        self.row_BK = torch.empty(sentences, beam, dtype=torch.int64, device="cpu")
        self._ended, self._log_probs = (c_int64 * (sentences * beam))(), (c_float * (sentences * beam))()

    def structure(self, tokens: int | None = None, log_probs: int | None = None) -> structures.Extended:
        """Return the addresses, with those of tokens and log-probabilities of the extended hypotheses."""
        of_ended = ctypes.addressof(self._ended), log_probs, ctypes.addressof(self._log_probs)
        return structures.Extended(self.row_BK.data_ptr(), tokens, *of_ended)

    def ended(self, count: int) -> tuple[list[int], list[float]]:
        """Return the rows of the hypotheses that end, given their number, and their log-probabilities."""
        return self._ended[:count], self._log_probs[:count]


def checked(result: int) -> int:
    """Return what a function of the code returns, or raise what it means if it is negative."""
    if result < 0:
        raise (
            MemoryError("no memory for a step of decoding") if result == -1 else IndexError("no such token or place")
        )
    return result


class Lookup(NamedTuple):
    """An embedding of tokens: rows of a table, (E,D), times a scale, plus the positions of the next steps, (T,D)."""

    table_ED: Tensor
    scale: float
    positions_TD: Tensor


class Library:
    """The compiled code, from a file.

    Attributes:
        panel_outputs: outputs of a panel.
        is_wide: True if its vectors are those of AVX2 or AVX-512.

    Raises:
        NativeError: if a file is no such library, or computes something else.
    """

    def __init__(self, file: Path) -> None:
        try:
            self.file, code = file, ctypes.CDLL(str(file))
            self.decode_layers, self.multiply_rows = code.decode_layers, code.multiply_rows
            self._extend, self._log_sums = code.extend_hypotheses, code.log_sums_of_rows
            self._embed, self.take_steps, self.take_passes = code.embed_tokens, code.take_steps, code.take_passes
            functions = self.decode_layers, self.multiply_rows, self._extend, self._embed, self.take_steps
            for function in (code.panel_outputs, *functions, self.take_passes):
                function.restype = c_int64
            self._log_sums.restype = None
            self.panel_outputs = int(code.panel_outputs())
            self.is_wide = self.panel_outputs >= _WIDE
        except (OSError, AttributeError) as error:  # such as a file system from which nothing may be run
            raise NativeError(f"the compiled code cannot be loaded ({error})") from error
        names = "Product", "Past", "Hypotheses", "Extended", "Decoder", "Changing", "Ended", "Drafted"
        kinds = (ctypes.POINTER(getattr(structures, name)) for name in names)
        product, past, known, found, decoder, changing, ended, drafted = kinds
        pointer_, integer = c_void_p, c_int64
        tables, range_ = [pointer_] * 4, [integer] * 2
        self.decode_layers.argtypes = (*tables, integer, pointer_, past, pointer_, pointer_, *range_)
        self.multiply_rows.argtypes = product, pointer_, integer, pointer_
        self._extend.argtypes = known, integer, integer, found
        self.take_steps.argtypes = decoder, past, known, changing, *[integer] * 3, found, ended
        self.take_passes.argtypes = decoder, decoder, past, known, drafted, *[integer] * 3
        of_table = pointer_, integer, integer, c_double
        self._embed.argtypes = (pointer_, integer, integer, *of_table, pointer_, integer, pointer_)
        self._log_sums.argtypes = pointer_, integer, integer, pointer_
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")
        x = torch.arange(35, dtype=torch.float32, device="cpu").view(7, 5)
        weight = (x.flatten()[:15] - 7.0).repeat(9)[:130].view(26, 5)
        if not torch.equal(Panels(self, weight, None)(x), x @ weight.t()):
            raise NativeError("the compiled code multiplies wrongly")

    def kept(self, x: Tensor) -> Tensor:
        """Return a contiguous copy in large pages, if the system has them: fewer addresses to look up."""
        size = x.numel() * x.element_size()
        with _LOCK:
            if size > len(self._free):
                memory = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(AttributeError, OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                self._free = torch.frombuffer(memory, dtype=torch.uint8)
            taken, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return taken.view(x.dtype).view(x.shape).copy_(x)

    def log_sums(self, x_RV: Tensor) -> Tensor:
        """Compute log sum_v exp x_v of each row. Shape: fp32 (R,V) -> (R,)."""
        log_sums_R = x_RV.new_empty(len(x_RV))
        self._log_sums(pointer(x_RV, x_RV.shape), *x_RV.shape, log_sums_R.data_ptr())
        return log_sums_R

    def embed(self, tokens_R1: Tensor, lookup: Lookup) -> Tensor:
        """Embed tokens at one position, or each at its own. Shape: -> fp32 (R,1,D)."""
        table_ED, scale, positions_TD = lookup
        rows, (entries, dim) = len(tokens_R1), table_ED.shape
        if tokens_R1.shape != (rows, 1) or tokens_R1.dtype != torch.int64 or not tokens_R1.is_cpu:
            raise ValueError(f"{tokens_R1.dtype} {tuple(tokens_R1.shape)} in place of a token for each row")
        states_R1D, positions = positions_TD.new_empty(rows, 1, dim), 1 if len(positions_TD) == 1 else rows
        table, position = pointer(table_ED, (entries, dim)), pointer(positions_TD, (positions, dim))
        of_position = position, 0 if positions == 1 else dim
        of_tokens = tokens_R1.data_ptr(), rows, tokens_R1.stride(0)
        if self._embed(*of_tokens, table, entries, dim, scale, *of_position, states_R1D.data_ptr()):
            raise IndexError("no such token")
        return states_R1D

    def extend(
        self,
        logits_RV: Tensor,
        log_sum_R: Tensor | None,
        tokens_RT: Tensor,
        log_prob_RT: Tensor,
        never: Tensor,
        sentences: int,
        beam: int,
        eos: int,
    ) -> Extended:
        """Find the 2K most probable extensions of each sentence's hypotheses, the first of equal ones first.

        Those by EOS among the first K end, if they are above -inf; the first K of the others live on. Logits of
        tokens that are ``never`` predicted become -inf; if others have, ``log_sum_R`` are the log-sums from before.
        ``tokens_RT`` and ``log_prob_RT`` are those of the hypotheses so far.
        """
        (rows, entries), length = logits_RV.shape, tokens_RT.shape[1]
        hypotheses = rows // sentences
        if rows != sentences * hypotheses or not hypotheses <= beam <= hypotheses * entries // 2:
            raise ValueError(f"{beam} extensions of {rows} x {entries} for {sentences} sentences")
        known = structures.Hypotheses(
            pointer(logits_RV, (rows, entries)),
            None if log_sum_R is None else pointer(log_sum_R, (rows,)),
            pointer(log_prob_RT, (rows, length)),
            pointer(tokens_RT, (rows, length), torch.int64),
            pointer(never, (len(never),), torch.int64),
            *(sentences, rows, length, entries, len(never)),
        )
        tokens_BKT = tokens_RT.new_empty(sentences, beam, length + 1)
        log_prob_BKT, found = log_prob_RT.new_empty(tokens_BKT.shape), Found(sentences, beam)
        buffers = found.structure(tokens_BKT.data_ptr(), log_prob_BKT.data_ptr())
        ended = found.ended(checked(self._extend(known, beam, eos, buffers)))
        return Extended(*ended, found.row_BK, tokens_BKT, log_prob_BKT)


class Panels:
    """A weight (E,D) and a bias or None, in panels.

    In int8 the weight is rounded with a scale for each output, and the input with one for each row.
    """

    def __init__(self, library: Library, weight_ED: Tensor, bias_E: Tensor | None, int8: bool = False) -> None:
        weight, self._library = weight_ED.detach().float(), library
        self.outputs, self.inputs = weight.shape
        if int8 and self.inputs > _MOST_INPUTS:
            raise ValueError(f"a product of {self.inputs} inputs is beyond the integers of int8")
        scale_E, group = weight.new_ones(self.outputs), _GROUP if int8 else 1
        if int8:
            scale_E = (weight.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
            weight = (weight / scale_E.unsqueeze(1)).round()
        rest = -self.outputs % library.panel_outputs
        padded = F.pad(weight, (0, -self.inputs % group, 0, rest))
        panels = padded.view(len(padded) // library.panel_outputs, library.panel_outputs, -1, group).transpose(1, 2)
        self._weight = library.kept((panels + _OFFSET).to(torch.uint8) if int8 else panels)
        self._scale = F.pad(scale_E, (0, rest))
        bias_E = weight_ED.new_zeros(self.outputs) if bias_E is None else bias_E.detach()
        self._bias = F.pad(bias_E.float(), (0, rest))
        pointers = (x.data_ptr() for x in (self._weight, self._scale, self._bias))
        self.structure = structures.Product(*pointers, self.inputs, self.outputs, int8)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b. Shape: fp32 (..., D) -> (..., E)."""
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        rows = y.numel() // self.outputs
        of_x, of_y = pointer(x.view(-1, self.inputs), (rows, self.inputs)), pointer(y, y.shape)

        def multiply(first: int, end: int, kept: Any = (x, y)) -> int:
            part = self.structure, of_x + 4 * first * self.inputs, end - first, of_y + 4 * first * self.outputs
            return int(self._library.multiply_rows(*part))

        if in_threads(multiply, rows, ROWS_OF_A_THREAD):
            raise MemoryError("no memory for a product")
        return y


def in_one_thread(rows: int) -> bool:
    """Return True if all that is done for so many rows is done in one thread."""
    return torch.get_num_threads() == 1 or rows < 2 * ROWS_OF_A_THREAD


def in_threads(call: Callable[[int, int], int], count: int, of_a_thread: int) -> int:
    """Call for the range from 0 to ``count`` in as many threads as torch uses, each for at least ``of_a_thread``.

    Return the largest result. Ctrl+C leaves the threads at work, so ``call`` must refer to all memory that it uses.
    """
    parts = max(1, min(torch.get_num_threads(), count // of_a_thread))
    bounds = [count * part // parts for part in range(parts + 1)]
    if parts == 1:
        return call(0, count)
    futures = [_threads().submit(call, *pair) for pair in pairwise(bounds)]
    return max(future.result() for future in futures)


class _Threads:
    """Threads that make calls until the process ends; an executor takes none once the main thread has ended."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[int], Callable[[int, int], int], int, int]] = SimpleQueue()
        for _ in range(count):
            Thread(target=self._work, name="native", daemon=True).start()

    def submit(self, call: Callable[[int, int], int], first: int, end: int) -> Future[int]:
        future: Future[int] = Future()
        self._calls.put((future, call, first, end))
        return future

    def _work(self) -> None:
        while True:
            future, call, *bounds = self._calls.get()
            try:
                future.set_result(call(*bounds))
            except BaseException as error:
                future.set_exception(error)
            del future, call  # and what it refers to


@cache
def _threads() -> _Threads:
    return _Threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads
_LOCK = Lock()  # of memory for weights; no child begins while another thread holds it
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def pointer(x: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor of exactly this shape and dtype, contiguous on the CPU."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} on {x.device} in place of contiguous {dtype} {tuple(shape)}")
    return x.data_ptr()


@cache
def library() -> Library:
    """Return the code for this CPU, which is compiled if need be.

    Raises:
        NativeError: if there is none.
    """
    return build(capability(), kept_directory())


def capability() -> str:
    """Return the first of :data:`CAPABILITIES` that this CPU has, as torch may use it."""
    name = torch.backends.cpu.get_cpu_capability()
    if name == "AVX512" and torch.cpu._is_vnni_supported():
        return "AVX512_VNNI"
    return name if name in CAPABILITIES else "DEFAULT"


@cache
def obstacle() -> str | None:
    """Return the reason why there is no native code here, or None."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return None


def build(capability: str, directory: Path) -> Library:
    """Return the code for one of :data:`CAPABILITIES` from a directory, after it is compiled if need be.

    Raises:
        NativeError: if it cannot be compiled, kept or loaded, or computes something else.
    """
    compiler = _compiler()
    try:
        _make_private(directory)
        version, source = _output_of([*compiler, "--version"]), _SOURCE.read_text(encoding="utf-8")
        own = () if "clang" in version.lower() else (_FLAG_OF_GCC,)
        command = [*compiler, *_FLAGS, *own, *CAPABILITIES[capability], str(_SOURCE)]
        made_of = [platform.machine(), version, *command[:-1], source]
        file = directory / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.so"
        if not _is_whole(file):
            logger.info("the code of decoding is compiled for this CPU, once: %s", file)
            with TemporaryDirectory() as scratch:
                new = Path(scratch) / file.name
                _output_of([*command, "-o", str(new)])
                content = new.read_bytes()
            atomic_write_bytes(file, content + hashlib.sha256(content).digest())
    except OSError as error:
        reason = error.strerror or error
        raise NativeError(f"{directory} cannot keep compiled code ({reason}); set XDG_CACHE_HOME") from error
    return Library(file)


def kept_directory() -> Path:
    """Return the directory that keeps compiled code."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed_nmt"
    except RuntimeError as error:
        raise NativeError("there is no home directory to keep compiled code in; set XDG_CACHE_HOME") from error


def _compiler() -> list[str]:
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeError(f"CXX is {os.environ['CXX']}, which has an open quotation") from error
    path = next(filter(None, map(shutil.which, given[:1] or _COMPILERS)), None)
    if path is None:
        raise NativeError("there is no C++ compiler; install g++" if not given else f"CXX is {given[0]}, no program")
    return [path, *given[1:]]


def _output_of(command: Sequence[str]) -> str:
    """Run a compiler and return its output; a NativeError if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_S).stdout
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), f"status {error.returncode}")
        raise NativeError(f"{command[0]} fails: {reason.strip()}") from error
    except (subprocess.TimeoutExpired, OSError, UnicodeDecodeError) as error:
        raise NativeError(f"{command[0]} fails: {error}") from error


def _make_private(directory: Path) -> None:
    """Make a directory in which only this user writes; a NativeError if it is another's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeError(
            f"{directory} is another user's, or others may write to it; remove it or set XDG_CACHE_HOME"
        )


def _is_whole(file: Path) -> bool:
    """Return True if a file is this user's library as it was written."""
    try:
        status, content = file.lstat(), read_regular(file)
    except OSError:
        return False
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return own and hashlib.sha256(content[:-32]).digest() == content[-32:]
