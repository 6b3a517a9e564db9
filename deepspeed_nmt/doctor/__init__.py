"""Examination of hosts before a training: software, GPUs, network, files, limits and the job."""
