"""Choice between CPU and GPU."""

from __future__ import annotations

import torch

from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.parallel.builds import lock_for, runs_on


def uses_cuda(device: str, option: str) -> bool:
    """Return True if a GPU is used: for "cuda", and for "auto" if there is one.

    Args:
        device: "auto", "cpu" or "cuda".
        option: setting or option that contains it, for messages.

    Raises:
        ConfigError: if ``device`` is another word, or is "cuda" and there is no GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"{option} must be auto, cpu or cuda, but is {shown(device)}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(f"{option} is cuda, but torch finds no GPU; use cpu, or install a CUDA build of torch")
    return device != "cpu" and available


def prepare_gpu(device: torch.device) -> None:
    """Make a GPU the current one, and turn cuDNN's attention off in this process.

    cuDNN builds a plan for every new shape of its tensors, which takes longer than the attention itself, and nearly
    every micro-batch and every batch of a search has a shape of its own. SDPA's other kernels take any shape.

    Args:
        device: a GPU.

    Raises:
        ConfigError: if torch has no kernels for it.
    """
    if torch.cuda.is_available() and (problem := kernel_problem(device)):
        raise ConfigError(problem)
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)


def kernel_problem(device: torch.device) -> str | None:
    """Return a sentence if this torch has no kernels for a GPU, with the lock that has; None if it has.

    Without this check the first operation on the GPU would fail, long after the start.
    """
    architectures = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if runs_on(capability, architectures):
        return None
    return (
        f"torch must have kernels for its GPU, the {torch.cuda.get_device_name(device)} (sm_{capability[0]}"
        f"{capability[1]}), but {torch.__version__} has them for {', '.join(architectures)}; "
        f"`pip install -r {lock_for(capability)}`"
    )
