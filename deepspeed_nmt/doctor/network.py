"""Checks of names, addresses, ports and interfaces of a host, and of NCCL's log."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path

from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, ok, warning
from deepspeed_nmt.doctor.limits import infiniband
from deepspeed_nmt.errors import shown

_DEFAULT_PORT = 29500
"""Port of `deepspeed` and `torchrun`, unless another one is given."""
_LAUNCHER_PORTS = (20000, 30000)
"""Range of the ports that launch/*.sbatch choose."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .* via (\S+)")
_NETWORK = re.compile(r"NET/(\w+) ?: Using (.+)")


def names(context: JobContext) -> list[Finding]:
    """Check that this host's name and that of rank 0's host can be resolved."""
    found = []
    own = _addresses(context.host)
    several = context.place.ranks > max(1, context.local_ranks)
    interface = context.environment.get("GLOO_SOCKET_IFNAME")
    if not own and several and not interface:
        found.append(
            fault(
                f"the name of each host must resolve, but {context.host} does not know its own, so that gloo would "
                "listen on 127.0.0.1 only; add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface"
            )
        )
    master = context.environment.get("MASTER_ADDR")
    if master and not _addresses(master):
        found.append(
            fault(
                f"MASTER_ADDR must be a name or address that every host resolves, but {context.host} cannot resolve "
                f"{shown(master)}; give the address of the first host"
            )
        )
    return found or [
        ok(f"{context.host} is {', '.join(own) or 'known by no address'}{f', rank 0 at {master}' * bool(master)}")
    ]


def _addresses(name: str) -> list[str]:
    """Return the addresses of a name, without repetition; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def interfaces(context: JobContext) -> list[Finding]:
    """Check that the network interfaces that are named exist, and report what is set for NCCL and gloo."""
    present = [name for _, name in socket.if_nameindex()]
    found = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = context.environment.get(variable, "")
        exact = variable.startswith("GLOO") or given.startswith("=")
        wanted = [name for name in given.lstrip("=").split(",") if name]
        fits = any(name == each if exact else name.startswith(each) for name in present for each in wanted)
        if wanted and not given.startswith("^") and not fits:
            found.append(
                fault(
                    f"{variable} must name a network interface of each host, but is {given}, and here are "
                    f"{', '.join(present)}; correct it, or unset it"
                )
            )
    prefixes = ("NCCL_", "GLOO_", "UCX_", "FI_")
    set_here = sorted(f"{name}={value}" for name, value in context.environment.items() if name.startswith(prefixes))
    devices = infiniband()
    if devices and context.environment.get("NCCL_IB_DISABLE") == "1" and context.has_gpus:
        found.append(
            warning(
                f"NCCL should use InfiniBand ({', '.join(devices)}), but NCCL_IB_DISABLE is 1, so it uses sockets, "
                "which are many times slower; unset it"
            )
        )
    state = f"interfaces {', '.join(present)}{f'; InfiniBand {chr(44).join(devices)}' * bool(devices)}"
    return found or [ok(f"{state}{f'; {chr(32).join(set_here)}' * bool(set_here)}")]


def port(context: JobContext) -> list[Finding]:
    """Check the port of the rendezvous, and the range from which launchers choose it."""
    found = []
    low, high = _ephemeral()
    if low < _LAUNCHER_PORTS[1] and high > _LAUNCHER_PORTS[0]:
        found.append(
            warning(
                f"ports {_LAUNCHER_PORTS[0]} to {_LAUNCHER_PORTS[1]} should be free for rank 0, but this system "
                f"gives ports {low} to {high} to outgoing connections; `sysctl "
                f"net.ipv4.ip_local_port_range='32768 60999'` "
                "as root"
            )
        )
    if context.place.ranks > 1:  # rank 0 listens there itself
        return found
    text = context.environment.get("MASTER_PORT", "")
    if text and not (text.isdecimal() and 0 < int(text) < 65536):
        return [*found, fault(f"MASTER_PORT must be a port, but is {shown(text)}; set a number from 1024 to 65535")]
    number = int(text or _DEFAULT_PORT)
    if _is_free(number):
        return found or [ok(f"port {number} is free")]
    if text:
        return [
            *found,
            fault(f"MASTER_PORT must be free on the first host, but something listens on {number}; choose another"),
        ]
    return [
        *found,
        warning(
            f"port {number}, the default of `deepspeed` and `torchrun`, should be free, but something listens there; "
            "start them with --master_port and another number"
        ),
    ]


def _ephemeral() -> tuple[int, int]:
    """Return the range of ports for outgoing connections; an empty one if it is not known."""
    try:
        low, high = map(int, _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 65536, 0
    return low, high


def _is_free(number: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", number))
        except OSError:
            return False
    return True


def transports(lines: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the transports that NCCL uses between ranks, and the devices of its network, from its log."""
    used, devices = set(), set()
    for line in lines:
        if match := _CHANNEL.search(line):
            parts = match.group(1).split("/")
            direct = " with GPUDirect" if "GDRDMA" in parts else ""
            used.add("/".join(parts[:2] if parts[0] in ("NET", "P2P") else parts[:1]) + direct)
        elif match := _NETWORK.search(line):
            devices.add(f"{match.group(1)}: {match.group(2).strip()}")
    return used, devices
