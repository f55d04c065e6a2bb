"""Builds an image of `deployments/Dockerfile` without a registry, and runs it as its users would.

    python -m tests.benchmarks.image [--target cpu] [--folder /var/tmp/tinkerflow-image] [--share PATH ...] [--keep]

As root, with Debian's packages debootstrap and buildah. The base image `python:…` is a Debian root of debootstrap with
Debian's own Python; all that follows is what buildah reads from the Dockerfile. The image then runs with its own
variables, user, commands and health check: a read-only root, a volume, a tmpfs, no capability, in a network namespace.
First `quickstart`; then a service in one container with a group of two processes, each in a container of its own. One
of these is killed while a model is trained: its losses must be those of a model that was trained undisturbed. Prints
the size and the times. All of it is removed at the end, unless --keep is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tests.benchmarks.service import datum
from tests.netns import NetHost, network
from tinker import types

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deployments" / "Dockerfile"
MIRROR = "http://deb.debian.org/debian"
WAIT_SECONDS = 600.0
OURS = {"TINKERFLOW_PLATFORM": "cpu", "TINKERFLOW_WARM_UP": "false"}  # variables beside the image's
# $1: root, $2: folder of the volume, $3: its path in the container, $4: name, $5: working directory, $6: user; then the
# command. Docker, too, mounts these.
START = """
set -e
root=$1 data=$2 volume=$3 name=$4 work=$5 user=$6; shift 6
hostname "$name"
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
for device in null zero full random urandom; do
    touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm" && mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
mount --bind "$data" "$root$volume"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all \
    sh -c 'cd "$0" && exec "$@"' "$work" "$@"
"""


class Images:
    """Images and containers in a folder."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made yet."""
        self.folder = folder
        places = ("--root", str(folder / "storage"), "--runroot", str(folder / "run"))
        self._command = ("buildah", "--storage-driver", "overlay", *places)

    def do(self, *words: str) -> str:
        """A command of buildah: what it prints last."""
        done = subprocess.run((*self._command, *words), stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def make_base(self) -> None:
        """The image that the Dockerfile begins with, from debootstrap."""
        (tag,) = re.findall(r"^ARG PYTHON=(\S+)$", FILE.read_text(), re.M)
        name = f"docker.io/library/python:{tag}"
        if self.do("images", "--quiet", "--filter", f"reference={name}"):
            return
        suite, container = tag.rsplit("-", 1)[1], self.do("from", "scratch")
        root = Path(self.do("mount", container))
        with_python = "--include=python3,python3-venv,ca-certificates"
        command = ("debootstrap", "--variant=minbase", with_python, suite, str(root), MIRROR)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        path = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
        self.do("config", "--env", f"PATH={path}", "--env", "LANG=C.UTF-8", container)
        self.do("commit", "--quiet", "--rm", container, name)

    def build(self, target: str, shared: list[Path]) -> str:
        """Build a target: the image's name. shared: folders and files of this machine that its steps see."""
        name = f"localhost/tinkerflow:{target}"
        volumes = [word for path in shared for word in ("--volume", f"{path}:{path}:ro")]
        how = ("--pull-never", "--format", "docker", "--isolation", "chroot", "--quiet", *volumes)
        self.do("bud", *how, "--target", target, "--tag", name, "--file", str(FILE), str(ROOT))
        return name

    def size(self, image: str) -> str:
        """Of all its layers, with its unit."""
        return str(json.loads(self.do("images", "--json", image))[0]["size"])

    def config(self, image: str) -> dict[str, Any]:
        """Variables, user, commands, volumes and health check."""
        return dict(json.loads(self.do("inspect", "--type", "image", image))["Docker"]["config"])


class Container:
    """An image that runs on a host of the network."""

    def __init__(self, images: Images, image: str, host: NetHost, names: dict[str, str]) -> None:
        """Nothing runs before `start`. names: addresses of all hosts, by name."""
        self.host = host
        self._config = images.config(image)
        self._images, self._id = images, images.do("from", "--pull-never", image)
        self._root = Path(images.do("mount", self._id))
        lines = [f"{address} {name}" for name, address in names.items()]
        (self._root / "etc/hosts").write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
        (self._volume,) = self._config["Volumes"]
        self._user = int(self._config["User"])
        self.data = images.folder / "data" / host.name
        self.data.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Run the image with these arguments in place of its own."""
        for path in (self.data, *self.data.iterdir()):
            os.chown(path, self._user, self._user)
        alone = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork")
        volume = (str(self.data), self._volume)
        start = ("sh", "-c", START, "sh", str(self._root), *volume, self.host.name, self._config["WorkingDir"])
        command = ("ip", "netns", "exec", self.host.name, *alone, *start, str(self._user))
        self._process = subprocess.Popen((*command, *self._config["Entrypoint"], *words), env=self._variables())
        return self._process

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command beside the one that runs, as its user."""
        first = self._first()
        assert first is not None
        inside = ("nsenter", "--target", first, "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd")
        user = str(self._user)
        rights = ("--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs", "--bounding-set=-all")
        command = (*inside, "setpriv", *rights, *words)
        return subprocess.run(command, env=self._variables(), capture_output=True, text=True, check=False)

    def _first(self) -> str | None:
        """The pid of its first process, once that is in its root."""
        pid = self._process.pid if self._process is not None else 0
        with suppress(OSError):
            for first in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if Path(f"/proc/{first}/root").readlink() == self._root:
                    return first
        return None

    def is_running(self) -> bool:
        """Whether commands can be executed."""
        return self._first() is not None

    def is_healthy(self) -> bool:
        """Whether the image's health check says so."""
        if not self.is_running():
            return False
        kind, *words = self._config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.execute(*words).returncode == 0

    def kill(self) -> None:
        """kill -9 of everything in it."""
        if self._process is None:
            return
        if (first := self._first()) is not None:
            os.kill(int(first), signal.SIGKILL)  # all others end with it
        else:
            self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        """End it, and delete what it wrote."""
        self.kill()
        self._images.do("umount", self._id)
        self._images.do("rm", self._id)
        shutil.rmtree(self.data)

    def _variables(self) -> dict[str, str]:
        given = dict(line.split("=", 1) for line in self._config["Env"])
        return given | OURS


@contextmanager
def containers(images: Images, image: str, count: int) -> Iterator[list[Container]]:
    """So many containers, each on a host of its own."""
    with ExitStack() as stack:
        hosts = stack.enter_context(network(count)).hosts
        names = {host.name: host.address for host in hosts}
        made = []
        for host in hosts:
            made.append(Container(images, image, host, names))
            stack.callback(made[-1].remove)
        yield made


def check_confined(container: Container) -> None:
    """RuntimeError unless its processes may do as little as we say."""
    status = container.execute("cat", "/proc/self/status").stdout
    rights = {name: value.strip() for name, _, value in (line.partition(":") for line in status.splitlines())}
    found = {name: rights[name] for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs")}
    user = "\t".join(["10001"] * 4)
    none = "0" * 16
    if found != {"Uid": user, "CapEff": none, "CapBnd": none, "NoNewPrivs": "1"}:
        raise RuntimeError(f"its processes have rights: {found}")
    for path in ("/", "/opt/tinkerflow", "/etc", "/usr/local"):
        said = container.execute("touch", f"{path}/written").stderr
        if "Read-only file system" not in said:
            raise RuntimeError(f"{path} can be written to, or: {said}")


def lesson(images: Images, image: str) -> None:
    """`tinkerflow quickstart` in a container."""
    with containers(images, image, 1) as (container,):
        process = container.start("quickstart")
        until(container.is_running, process)
        check_confined(container)
        if status := process.wait(WAIT_SECONDS):
            raise RuntimeError(f"quickstart ended with {status}")


def group(images: Images, image: str) -> float:
    """A service and a group of two processes: the seconds from the kill of one of them to the next step."""
    with containers(images, image, 3) as (service, *workers):
        for container in (service, *workers):
            (container.data / "group.secret").write_text("0123456789abcdef" * 2)
        place = f"{service.host.address}:7000"
        words = images.config(image)["Cmd"]
        serving = service.start(*words, "--group", place, "--processes", "2")
        for worker in workers:
            if status := worker.start("models", "fetch").wait(WAIT_SECONDS):
                raise RuntimeError(f"models fetch ended with {status}")
            worker.start("worker", "--group", place)
        until(service.is_healthy, serving)
        (key,) = re.findall(r"tml-\S+", service.execute("tinkerflow", "key", "create", "me").stdout)
        url, waited = f"http://{service.host.address}:8000", 0.0
        rest = tinker.RestClient(base_url=url, api_key=key)
        base_model = str(rest.get_server_capabilities().result().supported_models[0].model_name)
        client = tinker.ServiceClient(base_url=url, api_key=key)

        def losses(disturb: Callable[[], None]) -> list[float]:
            nonlocal waited
            trainer = client.create_lora_training_client(base_model=base_model, rank=8, seed=3).result()
            found = []
            for step in range(4):
                if step == 2:
                    disturb()
                began = time.monotonic()
                forward = trainer.forward_backward([datum([1 + i % 200 for i in range(40)])] * 4, "cross_entropy")
                trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
                found.append(forward.result().metrics["loss:sum"])
                waited = max(waited, time.monotonic() - began)
            return found

        def lose_one() -> None:
            nonlocal waited
            waited = 0.0
            workers[-1].kill()
            workers[-1].start("worker", "--group", place)

        alone, disturbed = losses(lambda: None), losses(lose_one)
        if alone != disturbed or alone[-1] >= alone[0]:
            raise RuntimeError(f"losses: {alone}, and {disturbed} with a kill")
        return waited


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Return when it holds; RuntimeError when the process has ended, or that takes longer than WAIT_SECONDS."""
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"process {process.pid} has ended, or is not ready in {WAIT_SECONDS:g} s")
        time.sleep(1.0)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/tinkerflow-image"), help="about 5 GB")
    parser.add_argument("--share", type=Path, action="append", default=[], help="what steps see, as a package index")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the images, for the next run")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    images = Images(args.folder)
    try:
        times = [time.monotonic()]

        def lap() -> float:
            times.append(time.monotonic())
            return times[-1] - times[-2]

        images.make_base()
        print(f"a Debian root with Python: {lap():.0f} s", flush=True)
        image = images.build(args.target, args.share)
        print(f"{image}: {images.size(image)}, built in {lap():.0f} s", flush=True)
        lesson(images, image)
        print(f"quickstart passed in {lap():.0f} s", flush=True)
        waited = group(images, image)
        print(
            f"a group of two containers passed in {lap():.0f} s; {waited:.1f} s from a kill to the next step",
            flush=True,
        )
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        if not args.keep:
            images.do("rmi", "--all", "--force")
            shutil.rmtree(args.folder)
    os._exit(0)  # the SDK's threads would hold this process


if __name__ == "__main__":
    main()
