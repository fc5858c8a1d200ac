"""Forks ranks from a process that has imported torch and the package, one clean process each.

Reads one JSON message a line on stdin, answers on stdout. It never touches a device, so forks start without a CUDA
context. It dies with its supervisor, and its ranks die with it.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

import train
from train.launch import process

#: argument of a server that imports only what a rank needs before it builds its model
LIGHT = "--light"


def _run_rank(message: dict[str, Any], server: int) -> int:
    """The forked child, until the rank's end."""
    from train import worker  # already imported: a fork of it is what makes the start warm

    os.setpgid(0, 0)
    process.die_with(server)
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(message["env"])
    return worker.run(message["folder"], message["scratch"])


class Server:
    """The loop: messages in, forks out, ends of ranks reported as they happen."""

    def __init__(self, out: int) -> None:
        self.out = out
        self.ranks: set[int] = set()
        self.buffer = os.environ.pop("MFU_SWEEP_PENDING", "").encode()
        self.pid = os.getpid()
        self.wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def say(self, **message: Any) -> None:
        """One message to the supervisor."""
        os.write(self.out, json.dumps(message).encode() + b"\n")

    def fork(self, job: Any) -> int:
        """Run job() in a child that ends with its return value."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = job()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def probe(self) -> None:
        """Ask torch about this host in a child."""
        from train.launch import probe

        read, write = os.pipe()

        def job() -> int:
            os.write(write, json.dumps(probe.look()).encode())
            return 0

        pid = self.fork(job)
        os.close(write)
        with os.fdopen(read, "rb") as f:
            text = f.read()
        os.waitpid(pid, 0)
        self.say(probe=json.loads(text or b'{"error": "the probe ended without an answer"}'))

    def reap(self) -> None:
        """Report ranks that ended; adopted orphans are only collected."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self.ranks:
                self.ranks.discard(pid)
                self.say(exit=pid, code=os.waitstatus_to_exitcode(status), at=time.monotonic())

    def clean(self) -> None:
        """Kill every descendant and wait for their end."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            left = process.strays()
            if not left:
                break
            for p in left:
                process.kill(p.pid)
            self.reap()
            time.sleep(0.002)
        self.reap()
        self.say(cleaned=True)

    def handle(self, message: dict[str, Any]) -> None:
        """One message of the supervisor."""
        if message["do"] == "start":
            try:
                pid = self.fork(lambda: _run_rank(message, self.pid))
            except OSError as e:
                self.say(started=0, error=str(e))
                return
            self.ranks.add(pid)
            self.say(started=pid)
        elif message["do"] == "probe":
            self.probe()
        elif message["do"] == "import" and LIGHT not in sys.argv:
            _import(message["name"])
            if _forks_lost_the_gpu():
                self.restart()
            gc.freeze()
        elif message["do"] == "clean":
            self.clean()

    def restart(self) -> None:
        """Become a server that has imported less: slower starts, and forks that can use the GPU."""
        os.dup2(self.out, 1)
        pending = self.buffer.decode()
        env = os.environ | {"MFU_SWEEP_PARENT": str(os.getppid()), "MFU_SWEEP_PENDING": pending}
        os.execve(sys.executable, [sys.executable, "-m", "train.launch.server", LIGHT], env)

    def loop(self) -> None:
        """Until stdin closes."""
        while True:
            while b"\n" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\n")
                self.handle(json.loads(line))
            ready, _, _ = select.select([0, self.wake_read], [], [])
            if self.wake_read in ready:
                os.read(self.wake_read, 4096)
            self.reap()
            if 0 in ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    break
                self.buffer += chunk
        for p in process.strays():
            process.kill(p.pid)


#: what keeps imports off the GPU: Inductor starts compile workers and asks for the GPU's properties unless told not to
#: (the second name is what torch before 2.13 knows), and torch.cuda.is_available() counts devices through NVML
QUIET = {"TORCH_WARM_POOL": "0", "TORCH_TNT_IN_USE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: modules with Hydra in them
COMMAND_LINE = (
    "train.sweep", "train.errors", "train.command_line", "train.completion", "train.help", "train.__main__",
)  # fmt: skip


def _import(name: str) -> None:
    """Import a module for the forks to come."""
    before = {key: os.environ.get(key) for key in QUIET}
    os.environ.update(QUIET)
    try:
        importlib.import_module(name)
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _forks_lost_the_gpu() -> bool:
    """Whether a fork of this process could not use CUDA any more, as a fork of it says."""
    pid = os.fork()
    if pid == 0:
        import torch

        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _import_everything(light: bool) -> None:
    """torch and the whole trainer, once: the point of the server, and no rank runs code edited since."""
    left_out = COMMAND_LINE if importlib.util.find_spec("triton") else (*COMMAND_LINE, "train.kernels.jit")
    for module in pkgutil.walk_packages(train.__path__, "train."):
        if not module.name.startswith(left_out):
            _import(module.name)
    if light:
        return
    # what a rank would import when it builds its model: dynamo alone costs it 2 s
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"):
        _import(name)
    with contextlib.suppress(OSError):
        socket.gethostbyname(socket.gethostname())  # pulls in an encoding


def main() -> None:
    """Entry point of `python -m train.launch.server`."""
    process.die_with(int(os.environ.pop("MFU_SWEEP_PARENT")))
    process.adopt_orphans()
    server = Server(os.dup(1))
    os.dup2(2, 1)  # anything printed by an import must not end up among the messages
    # Python 3.12 says so at every fork beside threads; those here are idle pools of libraries
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    light = LIGHT in sys.argv
    _import_everything(light)
    if not light and _forks_lost_the_gpu():
        server.restart()
    gc.collect()
    gc.freeze()  # keeps the pages shared after the fork
    server.loop()


if __name__ == "__main__":
    main()
