"""Interfaces, routes and ports of this host, by the standard library alone (IPv4 and IPv6)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from . import agent_site

IFF_UP = 0x1
IFF_LOOPBACK = 0x8
SIOCGIFFLAGS = 0x8913
SIOCGIFMTU = 0x8921
FREE_PORT_RANGE = (20000, 32000)
SLOW_NAME_S = 0.5
DISCARD = 9  # the port of a connected UDP socket that never sends


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("target", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interface_addresses() -> list[tuple[str, str, int]]:
    """Return (interface, address, bits of the prefix) for every address; link-local IPv6 carries its `%interface`."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    try:
        entry = head
        while entry:
            item = entry.contents
            name = os.fsdecode(item.name)
            address = _read_address(item.address, name)
            if address:
                found.append((name, address, _prefix(item.netmask)))
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return found


def _read_address(pointer: int | None, interface: str) -> str:
    if not pointer:
        return ""
    family = struct.unpack("H", ctypes.string_at(pointer, 2))[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        packed = ctypes.string_at(pointer + 8, 16)
        scoped = packed[0] == 0xFE and packed[1] & 0xC0 == 0x80
        return socket.inet_ntop(socket.AF_INET6, packed) + (f"%{interface}" if scoped else "")
    return ""


def _prefix(pointer: int | None) -> int:
    """Count the bits of a netmask; 0 when there is none."""
    if not pointer:
        return 0
    family = struct.unpack("H", ctypes.string_at(pointer, 2))[0]
    mask = ctypes.string_at(pointer + 8, 16) if family == socket.AF_INET6 else ctypes.string_at(pointer + 4, 4)
    return sum(bin(byte).count("1") for byte in mask)


def interfaces() -> list[dict[str, Any]]:
    """Return all interfaces in the kernel's order (see InterfaceFacts)."""
    addresses = interface_addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in sorted(socket.if_nameindex()):
            request = struct.pack("256s", os.fsencode(name)[:15])
            flags = mtu = 0
            with contextlib.suppress(OSError):
                flags = struct.unpack("H", fcntl.ioctl(probe, SIOCGIFFLAGS, request)[16:18])[0]
                mtu = struct.unpack("i", fcntl.ioctl(probe, SIOCGIFMTU, request)[16:20])[0]
            found.append(
                {
                    "name": name,
                    "addresses": [address for owner, address, _ in addresses if owner == name],
                    "prefixes": [prefix for owner, _, prefix in addresses if owner == name],
                    "mtu": mtu,
                    "up": bool(flags & IFF_UP),
                    "loopback": bool(flags & IFF_LOOPBACK),
                }
            )
    return found


def routes(targets: dict[str, str]) -> list[dict[str, str]]:
    """Return, for each peer and its address or name, our source address and interface (see RouteFacts)."""
    owners = {address: name for name, address, _ in reversed(interface_addresses())}
    return [_route(peer, target, owners) for peer, target in targets.items()]


def _route(peer: str, target: str, owners: dict[str, str]) -> dict[str, str]:
    route = {"peer": peer, "target": target, "source": "", "interface": "", "error": ""}
    try:
        family, _, _, _, address = socket.getaddrinfo(target, DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            source = _numeric(probe.getsockname())
    except (OSError, UnicodeError) as error:
        route["error"] = f"{target}: {getattr(error, 'strerror', None) or error}"
        return route
    route["source"] = source
    route["interface"] = owners.get(source, "")
    if not route["interface"]:
        route["error"] = f"no interface carries {source}, the source address towards {target}"
    return route


def _numeric(address: Any) -> str:
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def resolve(name: str, timeout_s: float = 3.0) -> list[str]:
    """Return the addresses that the name resolves to here; empty when it does not within the time."""
    found: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                address = str(entry[4][0])
                if address not in found:
                    found.append(address)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return list(found)


class SlowNames:
    """Asks, beside whatever else is done, for the name of an address of this host, as torch asks for its peers'."""

    def __init__(self) -> None:
        own = [address for _, address, _ in interface_addresses() if not address.startswith(("127.", "::1", "fe80:"))]
        self._end = time.monotonic() + SLOW_NAME_S
        self._thread = threading.Thread(target=self._ask, args=own[:1], daemon=True)
        self._thread.start()

    @staticmethod
    def _ask(address: str = "127.0.0.1") -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(address)  # getnameinfo keeps the interpreter to itself

    def verdict(self) -> bool:
        """Whether there was no answer within half a second, neither a name nor that there is none."""
        self._thread.join(max(0.0, self._end - time.monotonic()))
        return self._thread.is_alive()


def port_is_free(port: int, address: str = "") -> str:
    """Return why the TCP port cannot be listened on, empty when it can; on all addresses unless one is given."""
    wanted = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    if address:
        try:
            info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except OSError as error:
            return str(error.strerror or error)
        wanted = [(info[0], address)]
    for family, host in wanted:
        try:
            server = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        with server:
            try:
                # vLLM and the store of torch set it too; and only listen() tells two such sockets apart.
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((host, port))
                server.listen(1)
            except OSError as error:
                if family == socket.AF_INET6 and not address and error.errno != 98:
                    continue  # IPv6 switched off
                return str(error.strerror or error)
    return ""


def check_ports(ports: list[int], address: str = "") -> list[dict[str, Any]]:
    """Return for each TCP port whether it can be listened on, and who holds it when not (see PortFacts)."""
    found = []
    for port in ports:
        reason = port_is_free(port, address)
        holder = ""
        if reason:
            holder = port_holder(port) or reason
        found.append({"port": port, "free": not reason, "holder": holder})
    return found


def free_ports(count: int, limits: tuple[int, int] = FREE_PORT_RANGE) -> list[int]:
    """Return up to `count` TCP ports in [first, last), free on all addresses and outside the ephemeral range.

    The ephemeral range is avoided because the kernel hands its ports to any outgoing connection at any time.
    """
    low, high = _ephemeral_range()
    candidates = [port for port in range(*limits) if not low <= port <= high]
    found: list[int] = []
    while candidates and len(found) < count:
        port = candidates.pop(random.randrange(len(candidates)))
        if not port_is_free(port):
            found.append(port)
    return sorted(found)


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def port_holder(port: int) -> str:
    """Return `pid 123 (name)` of the process that has the TCP port bound, as far as this user may see it.

    A rank's has ` of cpupp's run ID` behind it.
    """
    listening, bound = _sockets_on(port)
    return _holder({inode for _, inode in listening or bound})


def stranger(port: int, ours: Iterable[int]) -> str:
    """Return who listens on the TCP port instead of the processes `ours`, or beside them on the same address.

    vLLM sets SO_REUSEPORT, so two of one user share a port without a word, and the kernel deals out the requests. Empty
    when nobody listens, or nobody else.
    """
    listening, _ = _sockets_on(port)
    held = {inode for pid in ours for inode in _sockets_of(pid)} if listening else set()
    places = {address for address, inode in listening if inode in held}
    others = {inode for address, inode in listening if inode not in held and (not places or address in places)}
    return _holder(others)


def _holder(inodes: set[str]) -> str:
    if not inodes:
        return ""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if inodes & _sockets_of(int(pid)):
                run = agent_site.run_named_by(int(pid))
                return f"pid {pid} ({_command(pid)})" + (f" of cpupp's run {run}" if run else "")
    return "a process of another user"


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def _sockets_on(port: int) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return (local address, inode) of the TCP sockets that listen on the port, and of the others that have it."""
    found: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            next(file)
            for line in file:
                fields = line.split()
                address, _, number = fields[1].rpartition(":")
                if int(number, 16) == port and fields[9] != "0":
                    found[fields[3] == "0A"].add((address, f"socket:[{fields[9]}]"))
    return found[True], found[False]


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
