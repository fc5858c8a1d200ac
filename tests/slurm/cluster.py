"""A real SLURM of two nodes on this host, in a temporary folder: munged, slurmctld, slurmd n1, n2; all stopped at the end.

    with Cluster(folder) as cluster:
        subprocess.run(["sinfo"], env=cluster.env())

Every daemon gets its own port, socket and key, so several clusters can run side by side. Needs root (slurmd starts jobs as
their user) and Debian's slurm-wlm and munge.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue")
#: what accounting needs more: Debian's slurmdbd and mariadb-server
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
CONF = """\
ClusterName=mfusweep
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=2,bf_interval=2
{accounting}
JobCompType=jobcomp/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=1
MaxArraySize={max_array}
KillWait=10
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=30
MessageTimeout=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations
"""
SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
"""


def missing(programs: tuple[str, ...] = PROGRAMS) -> list[str]:
    """Those programs that this host lacks."""
    return [p for p in programs if shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def listening(port: int) -> bool:
    """Whether somebody answers there."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


class Cluster:
    """Starts in __enter__, is gone after __exit__."""

    def __init__(
        self, folder: Path, max_array: int = 1001, slurmd_timeout: int = 15, more: str = "", accounting: bool = False
    ) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.settings = {"max_array": max_array, "slurmd_timeout": slurmd_timeout, "more": more}
        self.accounting = free_ports(2) if accounting else []  # of slurmdbd and of its database
        self.settings["accounting"] = (
            ACCOUNTING.format(folder=folder, port=self.accounting[0])
            if accounting
            else "AccountingStorageType=accounting_storage/none"
        )
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def env(self, **more: str) -> dict[str, str]:
        """This process's environment with this cluster's configuration."""
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": path} | more

    def command(self, *args: str, timeout: float = 60) -> str:
        """Standard output of a SLURM command. Raises CalledProcessError with its stderr shown."""
        done = subprocess.run(args, env=self.env(), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    def start(self, name: str, *command: str) -> None:
        """Start a daemon in the foreground, as our child that dies with us, so that none can be left over."""
        log = open(self.folder / f"{name}.out", "ab")
        self.daemons[name] = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *command),
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()

    def alive(self, name: str) -> bool:
        """Whether a daemon runs. A test of the same process that cleans up all of its descendants ends ours too."""
        return name in self.daemons and self.daemons[name].poll() is None

    def start_munge(self) -> None:
        """munged."""
        folder = self.folder
        # one that was killed leaves it, and the wait below is for the new one
        (folder / "munge.socket").unlink(missing_ok=True)
        self.start(
            "munged", "munged", "-F", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed", "--num-threads=2",
        )  # fmt: skip
        self.wait(lambda: (folder / "munge.socket").exists(), "munged")

    def start_node(self, node: str) -> None:
        """slurmd of n1 or n2."""
        self.start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        """End one daemon."""
        self.daemons[name].send_signal(sig)
        self.daemons.pop(name).wait(30)

    def start_controller(self) -> None:
        """slurmctld."""
        self.start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))

    def start_accounting(self) -> None:
        """A database of our own, slurmdbd on it, and root's account `team`."""
        port, database = self.accounting
        data = f"--datadir={self.folder}/db"
        install = (
            "mariadb-install-db",
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--user=root",
            data,
        )
        self.command(*install, "--skip-test-db")
        self.start(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", data, f"--socket={self.folder}/db.socket",
            "--bind-address=127.0.0.1", f"--port={database}", f"--pid-file={self.folder}/db.pid",
            "--innodb-buffer-pool-size=32M", "--innodb-lock-wait-timeout=900",
        )  # fmt: skip
        self.wait(lambda: listening(database), "database")
        conf = self.folder / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(SLURMDBD.format(folder=self.folder, port=port, database=database))
        self.start("slurmdbd", "slurmdbd", "-D")
        self.wait(lambda: listening(port), "slurmdbd")
        for thing in (("cluster", "mfusweep"), ("account", "team"), ("user", "root", "account=team")):
            self.command("sacctmgr", "--immediate", "add", *thing)

    def __enter__(self) -> "Cluster":
        for part in ("state", *(f"spool-{n}" for n in NODES)):
            (self.folder / part).mkdir(parents=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.conf.write_text(CONF.format(folder=self.folder, ports=free_ports(3), **self.settings))
        try:
            self.start_munge()
            if self.accounting:
                self.start_accounting()
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            self.wait(self.ready, "two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def ready(self) -> bool:
        """Both nodes take jobs."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"], env=self.env(), capture_output=True, text=True
        )
        return done.stdout.split() == ["idle", "idle"]

    def wait(self, condition: object, what: str, seconds: float = 60) -> None:
        """Until condition() is true. Raises TimeoutError with the controller's last lines."""
        end = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            if time.monotonic() > end:
                log = self.folder / "slurmctld.log"
                tail = log.read_text().splitlines()[-20:] if log.exists() else []
                raise TimeoutError(f"no {what} within {seconds} s\n" + "\n".join(tail))
            time.sleep(0.1)

    def drain(self) -> None:
        """Jobs are taken and wait."""
        self.command("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=test")

    def resume(self) -> None:
        """Jobs start again."""
        subprocess.run(
            ["scontrol", "update", f"nodename={','.join(NODES)}", "state=resume"], env=self.env(), capture_output=True
        )

    def jobs(self) -> list[str]:
        """Ids in the queue."""
        return self.command("squeue", "-h", "-r", "-o", "%i").split()

    def clear(self) -> None:
        """Cancel everything, bring both nodes back, wait until the queue is empty."""
        if not self.alive("munged"):
            self.start_munge()
        if not self.alive("slurmctld"):
            self.start_controller()
        for node in NODES:
            if not self.alive(node):
                self.start_node(node)
        self.wait(
            lambda: subprocess.run(["scontrol", "ping"], env=self.env(), capture_output=True).returncode == 0,
            "controller",
        )
        subprocess.run(["scancel", "--user", "root"], env=self.env())
        self.wait(lambda: not self.jobs(), "empty queue", 90)
        self.resume()
        self.wait(self.ready, "two idle nodes", 90)

    def __exit__(self, *_: object) -> None:
        if self.alive("munged") and self.alive("slurmctld"):  # else scancel asks for a minute
            subprocess.run(["scancel", "--user", "root"], env=self.env(), timeout=60)
        for name in ("slurmctld", *NODES, "slurmdbd", "mariadbd", "munged"):
            daemon = self.daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.processes():
            process.kill()

    def processes(self) -> list[psutil.Process]:
        """Daemons and job steps of this cluster, found by their configuration's path in their environment."""
        mark = f"SLURM_CONF={self.conf}".encode()
        found = []
        for p in psutil.process_iter():
            try:
                environ = Path(f"/proc/{p.pid}/environ").read_bytes()
            except OSError:
                continue
            if p.pid != os.getpid() and mark in environ.split(b"\0"):
                found.append(p)
        return found


@contextmanager
def names_resolve() -> Iterator[None]:
    """n1 and n2 in /etc/hosts, as on a cluster whose nodes know each other, while any test process needs them."""
    hosts, users = Path("/etc/hosts"), Path("/tmp/mfu-sweep-test-hosts")
    lines = "".join(f"127.0.0.1 {n} # mfu-sweep tests\n" for n in NODES)
    users.mkdir(exist_ok=True)
    mine = users / str(os.getpid())
    with FileLock(f"{users}.lock"):
        mine.touch()
        if lines not in hosts.read_text():
            with open(hosts, "a") as f:
                f.write(lines)
    yield
    with FileLock(f"{users}.lock"):
        mine.unlink()
        if not any(psutil.pid_exists(int(p.name)) for p in users.iterdir()):
            hosts.write_text(hosts.read_text().replace(lines, ""))
