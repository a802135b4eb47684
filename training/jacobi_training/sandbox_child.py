"""The process that runs untrusted code for ``sandbox.py``: it limits itself, runs the code and reports how it ended.

Run as a script with ``-I -S``; it imports the standard library only. Standard input holds one JSON object with code,
nonce and limits; standard output gets one JSON line before the code runs and one after.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_NEW_PRIVS, _SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2  # prctl

# linux/landlock.h: system calls (the same on all machines) and the rights to change files, by version of the interface.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 14
_MAKE_AND_REMOVE = 0b1_1111_1111 << 4  # remove directories and files; make devices, directories, files, sockets, links
_OWN_FOLDER = _WRITE_FILE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # remove both, make directories and files

# Refused calls: (number on x86_64, on aarch64, errno). Making a process or thread fails as if a limit were reached.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH of linux/audit.h
_REFUSED: dict[str, tuple[int | None, int | None, int]] = {
    "fork": (57, None, errno.EAGAIN),
    "vfork": (58, None, errno.EAGAIN),
    "clone": (56, 220, errno.EAGAIN),
    "clone3": (435, 435, errno.EAGAIN),
    "socket": (41, 198, errno.EPERM),
    "socketpair": (53, 199, errno.EPERM),
    "io_uring_setup": (425, 425, errno.EPERM),
    "kill": (62, 129, errno.EPERM),
    "tkill": (200, 130, errno.EPERM),
    "tgkill": (234, 131, errno.EPERM),
    "rt_sigqueueinfo": (129, 138, errno.EPERM),
    "rt_tgsigqueueinfo": (297, 240, errno.EPERM),
    "pidfd_send_signal": (424, 424, errno.EPERM),
    "ptrace": (101, 117, errno.EPERM),
    "process_vm_writev": (311, 271, errno.EPERM),
    "prlimit64": (302, 261, errno.EPERM),
    "setrlimit": (160, 164, errno.EPERM),
    "unshare": (272, 97, errno.EPERM),
    "setns": (308, 268, errno.EPERM),
    "chmod": (90, None, errno.EPERM),
    "fchmod": (91, 52, errno.EPERM),
    "fchmodat": (268, 53, errno.EPERM),
    "fchmodat2": (452, 452, errno.EPERM),
}


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    protections = protect(order["limits"])

    def write(**fields: Any) -> None:
        os.write(report, json.dumps({"nonce": order["nonce"], **fields}).encode() + b"\n")

    write(protections=protections)
    status, message = run_code(order["code"])
    write(status=status, message=message)
    os._exit(0)  # no exit handlers of the code


def run_code(code: str) -> tuple[str, str]:
    """Status and message of one run."""
    try:
        exec(compile(code, "answer.py", "exec"), {"__name__": "answer"})
    except MemoryError:
        return "memory", "MemoryError"
    except SystemExit as stop:
        return "exited", f"SystemExit({stop.code!r:.100})"
    except BaseException as error:
        return _status_of(error), f"{type(error).__name__}: {' '.join(str(error).split())}"[:500].rstrip(": ")
    return "passed", ""


def _status_of(error: BaseException) -> str:
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "processes"
    if isinstance(error, PermissionError):
        return "forbidden"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "memory"
    return "failed"


def protect(limits: dict[str, Any]) -> list[str]:
    """Give up what the code must not do; the names of what the kernel granted."""
    limit_resources(limits)
    held = ["rlimits"]
    if _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        return held
    if restrict_files("."):
        held.append("landlock")
    if drop_capabilities():
        held.append("capabilities")
    if refuse_calls():
        held.append("seccomp")
    return held


def limit_resources(limits: dict[str, Any]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    memory = limits["memory_mb"] << 20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, limits["file_kb"] << 10, limits["file_kb"] << 10),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def restrict_files(folder: str) -> bool:
    """Allow changes of files below ``folder`` and writes to /dev/null only, and no programs; Landlock."""
    version = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    truncate = _TRUNCATE if version >= 3 else 0
    rights = struct.pack("=Q", _EXECUTE | _WRITE_FILE | _MAKE_AND_REMOVE | truncate)
    rules = _LIBC.syscall(_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0)
    if rules < 0:
        return False
    for path, allowed in ((folder, _OWN_FOLDER | truncate), (os.devnull, _WRITE_FILE | truncate)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    held = _LIBC.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return held


def drop_capabilities() -> bool:
    """Give up root's powers, raising limits among them (capset, interface 3)."""
    return _LIBC.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0


def refuse_calls() -> bool:
    """Make the kernel refuse _REFUSED; seccomp, a filter in classic BPF."""
    if platform.machine() not in _MACHINES:
        return False
    column, machine = _MACHINES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow, kill = 0x00050000, 0x7FFF0000, 0x80000000
    # (code, steps to skip if true, if false, operand)
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse | errno.EPERM)]  # another table of calls: x32
    for *numbers, answer in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, refuse | answer)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    return _LIBC.prctl(_SET_SECCOMP, _SECCOMP_FILTER, header, 0, 0) == 0


if __name__ == "__main__":
    main()
