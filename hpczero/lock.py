"""One writer per run directory: the file `<run>/lock` names the process that holds it.

Protocol:
1. Open `lock`, creating it, and take the kernel's lock on it (flock). That lock dies with its
   process, so nothing is ever left to clean by hand. Refused: another process is writing, on this
   computer or on any computer that the file system's locks reach.
2. The file may have been removed between opening and locking: if the path no longer leads to the
   locked file, begin again.
3. On a local file system the kernel's answer is final. On a shared one its locks may end at the
   computer's edge (Lustre `localflock`) or not exist: then the record in the file counts too.
   A holder on this computer lives if its process does (same number, same start time). One elsewhere
   lives if the file was touched within `STALE_AFTER` seconds: a thread of the holder does that,
   whatever the holder itself is busy with.
4. Write this process's record. Where the kernel's answer is not final, wait for `SETTLE` seconds
   and read it back: of two computers that got here at once the last one to write has won, and the
   other one gives up.
5. Release: remove the file while it is still locked, then close it.

The descriptor is closed on exec and in forked children, so that no child keeps a dead run's lock.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import pwd
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import psutil

from hpczero import env, machine
from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import open_lock, open_to_read, remove

# in seconds
STALE_AFTER = 600.0  # without a beat; then a holder on another computer counts as dead
BEAT_EVERY = TOUCH_EVERY = 15.0
SETTLE = 1.0
PATIENCE = STALE_AFTER + 2 * BEAT_EVERY  # of a batch job that waits for a holder
LOOK_EVERY = 5.0
_LAST_MOMENTS = 30.0  # of a job, in which it waits no longer

_LONGEST_TEXT = 500  # characters of a value in a record
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class Held(InputError):
    """Another process writes in the run directory."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as written in its file."""

    host: str
    kernel: str  # identity of the boot: differs between two computers of the same name
    pid: int
    process_start: float  # differs between two processes that had the same number
    user: str
    since: str
    job: str | None

    @classmethod
    def this_process(cls) -> "Holder":
        process = psutil.Process()
        return cls(
            host=socket.gethostname(),
            kernel=machine.boot_identity(),
            pid=process.pid,
            process_start=process.create_time(),
            user=_user(),
            since=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            job=env.batch_job(),
        )

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        """Return the record in a lock file; None if it is empty, or not written by hpczero."""
        try:
            holder = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        return holder if holder._is_plausible() else None

    def _is_plausible(self) -> bool:
        """Return True if the values can be those of a process."""
        texts = [self.host, self.kernel, self.user, self.since, self.job or ""]
        if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts):
            return False
        if type(self.pid) is not int or not 0 < self.pid < 1 << 31:
            return False
        return type(self.process_start) in (int, float) and abs(self.process_start) < 1 << 62

    def lives(self, seconds_since_beat: float) -> bool:
        if self.kernel == machine.boot_identity():
            try:
                return abs(psutil.Process(self.pid).create_time() - self.process_start) < 1
            except psutil.Error:
                return False
        # clocks differ: a beat from the far future is none
        return abs(seconds_since_beat) < STALE_AFTER

    def __str__(self) -> str:
        job = f", batch job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}, started by {self.user} at {self.since}{job}"


class RunLock:
    """Hold the directory from `take` to `release`, or as a context; call `beat` now and then."""

    def __init__(self, run_directory: Path | str) -> None:
        self.path = Path(run_directory) / "lock"
        self._descriptor: int | None = None
        self._beaten = 0.0
        self._released = threading.Event()

    def take(self) -> "RunLock":
        self._take()
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())
        self._released.clear()
        threading.Thread(target=self._keep_touched, name="hpczero-lock", daemon=True).start()
        return self

    def take_in_job(self) -> "RunLock":
        """Take it; in a batch job wait for the holder, as nobody is there to stop it by hand.

        A holder on a node that was cut off counts as dead after `STALE_AFTER` seconds without a
        beat. One that lives on is a failure of this job (HpczeroError), and no wrong input.
        """
        began = time.time()
        said = False
        until = min(began + PATIENCE, (env.deadline() or math.inf) - _LAST_MOMENTS)
        while True:
            try:
                return self.take()
            except Held as error:
                if not env.batch_job():
                    raise
                if time.time() >= until:
                    waited = f"this job waited {time.time() - began:,.0f} s for it"
                    raise HpczeroError(f"{error}; {waited}") from error
                if not said:
                    print(f"hpczero: waiting: {error}", file=sys.stderr, flush=True)
                said = True
                time.sleep(min(LOOK_EVERY, max(0.0, until - time.time())))

    def _keep_touched(self) -> None:
        """Touch the file in a thread, in spite of failures: `beat` notices if the lock is lost."""
        while not self._released.wait(TOUCH_EVERY):
            descriptor = self._descriptor
            with contextlib.suppress(OSError):
                if descriptor is not None and self._leads_here(descriptor):
                    os.utime(descriptor)

    def __enter__(self) -> "RunLock":
        return self.take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def beat(self) -> None:
        """Take the lock again if its file was removed.

        Call it freely: it looks at the file at most every `BEAT_EVERY` seconds.
        """
        if self._descriptor is None or time.monotonic() - self._beaten < BEAT_EVERY:
            return
        if self._leads_here(self._descriptor):
            os.utime(self._descriptor)
            self._beaten = time.monotonic()
        else:
            self._forget()
            try:
                self._take()
            except InputError as error:  # no wrong input any more: this run has been writing
                raise HpczeroError(str(error)) from error

    def release(self) -> None:
        self._released.set()
        if self._descriptor is None:
            return
        if self._leads_here(self._descriptor):
            # The directory may have become read-only: the record of a dead process holds nothing.
            with contextlib.suppress(OSError):
                remove(self.path)
        self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self) -> None:
        final = machine.is_local_file_system(self.path.parent)
        while self._descriptor is None:
            descriptor = self._open()
            try:
                if self._locked(descriptor) and self._leads_here(descriptor):
                    self._claim(descriptor, final)
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        self._beaten = time.monotonic()

    def _open(self) -> int:
        try:
            return open_lock(self.path)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> InputError:
        return InputError(f"cannot write in the run directory {self.path.parent}: {error.strerror}")

    def _locked(self, descriptor: int) -> bool:
        """Take the kernel's lock; return False if the file is gone, raise Held if it is taken."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._leads_here(descriptor):
                raise self._held(self._record(descriptor)) from None
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise InputError(f"cannot lock {self.path}: {error.strerror}") from error
        return True

    def _claim(self, descriptor: int, final: bool) -> None:
        """Write this process's record, unless a holder beyond the kernel's lock may be alive."""
        if not final:
            before = _read(descriptor)
            silence = time.time() - os.fstat(descriptor).st_mtime
            if before is not None and before.lives(silence):
                raise self._held(before, silence)
        this = Holder.this_process()
        text = json.dumps(asdict(this)).encode() + b"\n"
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        except OSError as error:
            remove(self.path)
            raise self._cannot_write(error) from error
        if not final:
            time.sleep(SETTLE)
            after = _read(descriptor) if self._leads_here(descriptor) else None
            if after != this:
                raise self._held(after)

    def _leads_here(self, descriptor: int) -> bool:
        """Return True if the path still leads to the open file."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _record(self, descriptor: int) -> Holder | None:
        """Return the holder's record, which may be written a moment after its lock is taken."""
        for _ in range(20):
            record = _read(descriptor)
            if record is not None:
                return record
            time.sleep(0.05)
        return None

    def _held(self, holder: Holder | None, silence: float | None = None) -> Held:
        who = "another process that has not yet said who it is" if holder is None else str(holder)
        message = (
            f"the run directory {self.path.parent} is in use by {who}: "
            "wait for it or stop it, or give this run another name"
        )
        if holder is not None and silence is not None and holder.kernel != machine.boot_identity():
            message += (
                f" (its last sign of life was {silence:.0f} s ago; "
                f"after {STALE_AFTER:.0f} s it counts as dead; "
                f"if you know that it has ended, remove {self.path})"
            )
        return Held(message)


def living_holder(run_directory: Path) -> Holder | None:
    """Return the process that writes there now, by the lock's file alone, without locking it."""
    try:
        with os.fdopen(open_to_read(run_directory / "lock"), "rb") as file:
            silence = time.time() - os.fstat(file.fileno()).st_mtime
            holder = _read(file.fileno())
    except OSError:
        return None
    return holder if holder and holder.lives(silence) else None


def _read(descriptor: int) -> Holder | None:
    return Holder.parse(os.pread(descriptor, 65536, 0).decode(errors="replace"))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.getuid())
