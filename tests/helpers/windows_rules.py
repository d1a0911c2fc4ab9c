"""Pytest plugin that applies Windows' rules to the package on Linux: `pytest -p helpers.windows_rules`.

For callers in `latentcache` alone it hides what Windows lacks and refuses what Windows refuses:

* names: modules, and attributes of `os`, `signal` and `mmap`, that Windows lacks. `os.name` is "nt";
* files: open or mapped files cannot be removed, renamed or replaced; `os.rename` does not replace; folders cannot be
  opened; names with `<>:"|?*`, a trailing dot or space, or of a device are refused, as are names that differ in case;
* text: `os.open` without O_BINARY writes "\\r\\n" for "\\n".

It cannot show LockFileEx itself, programs that briefly hold a new file, or UNC paths.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import mmap
import os
import re
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import psutil

PACKAGE = "latentcache"
LOCKS = f"{PACKAGE}.utils.file_locks"
"""Uses its Linux implementation, because the Windows one needs Windows' ctypes."""
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "pty"}
ABSENT = {
    "os": {
        *("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECT", "O_SYNC", "WNOHANG", "MFD_CLOEXEC"),
        *("pread", "pwrite", "preadv", "pwritev", "posix_fadvise", "posix_fallocate", "fork", "register_at_fork"),
        *("uname", "getuid", "geteuid", "getgid", "getegid", "memfd_create", "sched_getaffinity", "statvfs"),
        *("fchown", "chown", "mkfifo", "killpg", "setsid", "getpgid", "sync", "sendfile", "fdatasync", "sysconf"),
        *("POSIX_FADV_WILLNEED", "POSIX_FADV_DONTNEED", "POSIX_FADV_SEQUENTIAL"),
    },
    "signal": {
        *("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGSTOP", "SIGCONT"),
        *("pthread_sigmask", "setitimer", "alarm", "pause", "sigwait", "SIG_BLOCK", "SIG_SETMASK"),
    },
    "mmap": {"MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE", "MADV_WILLNEED", "MADV_DONTNEED"},
}
O_BINARY = 1 << 30
BAD_NAME = re.compile(r'[<>:"|?*\x00-\x1f]|[ .]$|^(con|prn|aux|nul|com[1-9]|lpt[1-9])(\.|$)', re.IGNORECASE)
PASSED_THROUGH = ("pathlib", "shutil", "os", "contextlib", "tempfile", "posixpath", "io", __name__)
"""Modules that may be on the stack between the package and the system call."""
REAL = {name: getattr(os, name) for name in ("open", "write", "fsync", "utime", "unlink", "remove", "rmdir")}
REAL |= {name: getattr(os, name) for name in ("rename", "replace")}

text_descriptors: set[int] = set()


def denied(path: object, why: str) -> PermissionError:
    return PermissionError(errno.EACCES, f"[WinError 32] {why}", str(path))


def called_by_the_package() -> bool:
    """Whether the package made this call, directly or through the standard library."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        root = frame.f_globals.get("__name__", "").split(".")[0]
        if root in (PACKAGE, "diskcache"):
            return True
        if root not in PASSED_THROUGH and frame.f_globals.get("__name__") != __name__:
            return False
        frame = frame.f_back
    return False


def why_in_use(path: str) -> str | None:
    """Return why a file, or one in a folder, cannot be removed or renamed, or None."""
    if os.path.islink(path) or not os.path.lexists(path):
        return None
    real = os.path.realpath(path)

    def is_it(name: str) -> bool:
        return name == real or (os.path.isdir(real) and name.startswith(real + os.sep))

    here = psutil.Process()
    for process in (here.pid, *(child.pid for child in here.children(recursive=True))):
        folder = f"/proc/{process}"
        try:
            for descriptor in os.listdir(f"{folder}/fd"):
                if is_it(os.path.realpath(f"{folder}/fd/{descriptor}")):
                    return f"open as descriptor {descriptor} of process {process}"
            with open(f"{folder}/maps", encoding="utf-8", errors="replace") as maps:
                if any(is_it(line[line.find("/") :].rstrip("\n")) for line in maps if "/" in line):
                    return f"mapped by process {process}"
        except OSError:
            continue  # it has ended
    return None


def removing(name: str) -> Callable[..., None]:
    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        if called_by_the_package() and (why := why_in_use(os.fspath(path))):
            raise denied(path, why)
        REAL[name](path, *args, **kwargs)

    return remove


def renaming(name: str) -> Callable[..., None]:
    def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if called_by_the_package():
            if why := why_in_use(os.fspath(source)):
                raise denied(source, f"the source is {why}")
            if os.path.lexists(target):
                if name == "rename":
                    raise FileExistsError(errno.EEXIST, "[WinError 183] the target exists", str(target))
                if why := "a folder" if os.path.isdir(target) else why_in_use(os.fspath(target)):
                    raise denied(target, f"the target is {why}")
            check_name(target, is_new=True)
        REAL[name](source, target, *args, **kwargs)

    return rename


def check_name(path: object, *, is_new: bool) -> None:
    """Refuse a name that is invalid on Windows, or a new one that differs from another in case alone."""
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    folder, name = os.path.split(os.path.abspath(text))
    if not text or not name or folder.startswith(("/proc", "/dev/fd", "/sys")):
        return
    if BAD_NAME.search(name):
        raise OSError(errno.EINVAL, "[WinError 123] the name is not allowed", text)
    if is_new and not os.path.lexists(text) and os.path.isdir(folder):
        twins = [other for other in os.listdir(folder) if other.lower() == name.lower()]
        if twins:
            raise FileExistsError(errno.EEXIST, f"differs from {twins[0]!r} in case alone", text)


class View(types.ModuleType):
    """A module as the package sees it: without some names, and with some replaced."""

    def __init__(self, module: types.ModuleType, absent: set[str], own: dict[str, object]):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _absent=absent, **own)

    def __getattr__(self, name: str) -> object:
        if name in self._absent:
            problem = f"module {self.__name__!r} has no attribute {name!r} on Windows"
            raise AttributeError(problem, name=name, obj=self)
        return getattr(self._module, name)


def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise denied(path, "a folder cannot be opened")
    check_name(path, is_new=bool(flags & os.O_CREAT))
    descriptor = REAL["open"](path, flags & ~O_BINARY, mode)
    (text_descriptors.discard if flags & O_BINARY else text_descriptors.add)(descriptor)
    return int(descriptor)


def write(descriptor: int, data: Any) -> int:
    if descriptor in text_descriptors and b"\n" in bytes(data):
        REAL["write"](descriptor, bytes(data).replace(b"\n", b"\r\n"))
        return len(bytes(data))
    return int(REAL["write"](descriptor, data))


def fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "fsync needs a descriptor that writes")
    REAL["fsync"](descriptor)


def utime(path: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(path, int) or not kwargs.get("follow_symlinks", True):
        raise NotImplementedError("utime: no descriptor, no follow_symlinks=False")
    REAL["utime"](path, *args, **kwargs)


def install() -> None:
    """Install the views. Modules of the package that are already imported would keep the real ones."""
    assert PACKAGE not in sys.modules, "load this plugin by -p, before the package is imported"
    own: dict[str, object] = {"name": "nt", "O_BINARY": O_BINARY, "open": open_file, "write": write, "fsync": fsync}
    own |= {"utime": utime, "supports_dir_fd": frozenset(), "supports_fd": frozenset()}
    views = {
        "os": View(os, ABSENT["os"], own),
        "signal": View(signal, ABSENT["signal"], {}),
        "mmap": View(mmap, ABSENT["mmap"], {}),
    }
    real_import = builtins.__import__

    def import_module(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = "" if globals is None else str(globals.get("__name__", ""))
        if importer.split(".")[0] == PACKAGE and not level:
            if name in MODULES and importer != LOCKS:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in views:
                return views[name]
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = import_module
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, removing(name))
    for name in ("rename", "replace"):
        setattr(os, name, renaming(name))


install()
