"""The JobSet of a TPU slice, executed without a cluster: a pod is a network namespace, with its name and mounts.

Commands, environments, mounts and the read-only root are those that kubectl renders. What differs: devices are CPUs,
the model is the tiny one, the store and the journal are a folder that pods share, Prefect is off, and the user is root.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from browser import wait_for
from tests.deployments.test_kubernetes import environment, pods, workers
from tests.netns import NetHost, NotHereError, network
from tinker import types

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")]
OVERLAY = "tpu-jobset"
MODEL = "/var/lib/tinkerflow/models/tinkerflow/tiny-qwen3"
CHANGED = {
    "TINKERFLOW_PLATFORM": "cpu",
    "TINKERFLOW_BASE_MODELS": "[]",
    "TINKERFLOW_STORE": "file:///mnt/store",
    "TINKERFLOW_PIPELINES": "file:///mnt/pipelines",
    "TINKERFLOW_PREFECT": "off",
    "TINKERFLOW_DATABASE_URL": "sqlite:////mnt/journal.db",
    "TINKERFLOW_WARM_UP": "false",
    "TINKERFLOW_HEARTBEAT_TIMEOUT": "15",
}
# $1: name, $2: folder of the pod, $3: folder that pods share, $4: compiled programs; then the command
MOUNTS = """
set -e
name=$1 pod=$2 shared=$3 programs=$4; shift 4
hostname "$name"
mount -t tmpfs none /var/lib && mkdir /var/lib/tinkerflow && mount --bind "$pod/data" /var/lib/tinkerflow
mkdir -p /var/lib/tinkerflow/jax-cache && mount --bind "$programs" /var/lib/tinkerflow/jax-cache
mount --bind "$shared/mnt" /mnt
mount -t tmpfs none /run && mkdir /run/tinkerflow && cp "$shared/group.secret" /run/tinkerflow
mount -o remount,ro /run
mount --bind "$pod/tmp" /tmp
mount -o remount,ro,bind /
cd /
exec "$@"
"""


@dataclass
class Pod:
    """A pod whose containers run one after the other. Processes in it have a tree of their own, which ends with it."""

    name: str
    host: NetHost
    containers: list[dict[str, Any]]
    folder: Path
    programs: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def run(self, words: list[str], container: dict[str, Any], **how: Any) -> subprocess.Popen[bytes]:
        given = environment(OVERLAY, container)
        variables = given | {name: value for name, value in CHANGED.items() if name in given or "URL" not in name}
        if "TINKERFLOW_GROUP" in given:
            variables["TINKERFLOW_GROUP"] = given["TINKERFLOW_GROUP"].replace("10.0.0.7", self.host.address)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        alone = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        mounts = ("sh", "-c", MOUNTS, "sh", self.name, self.folder / self.name, self.folder, self.programs)
        return subprocess.Popen(
            ("ip", "netns", "exec", self.host.name, *alone, *mounts, *words),
            env={"PATH": path, "HOME": "/var/lib/tinkerflow", "PYTHONDONTWRITEBYTECODE": "1", **variables},
            **how,
        )

    def start(self) -> None:
        for part in ("data", "tmp"):
            shutil.rmtree(self.folder / self.name / part, ignore_errors=True)  # an emptyDir
            (self.folder / self.name / part).mkdir(parents=True)
        self.starts += 1
        with (self.folder / f"{self.name}-{self.starts}.log").open("wb") as log:
            *first, last = self.containers
            for container in first:
                assert self.run(container["command"], container, stdout=log, stderr=log).wait(120) == 0, self.said()
            self.process = self.run(last["command"], last, stdout=log, stderr=log)

    def said(self) -> str:
        return (self.folder / f"{self.name}-{self.starts}.log").read_text()

    def is_ready(self) -> bool:
        probe = self.containers[-1]["readinessProbe"]["exec"]["command"]
        words = ("ip", "netns", "exec", self.host.name, *probe)
        return subprocess.run(words, check=False).returncode == 0

    def kill(self) -> None:
        """Its node is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def drain(self) -> int:
        """SIGTERM to its first process, as kubelet ends pods: its exit status."""
        assert self.process is not None
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        subprocess.run(("kill", "-TERM", first), check=True)
        return self.process.wait(60)


@pytest.fixture
def cluster(tmp_path: Path, compiled_programs: Path) -> Iterator[dict[str, Pod]]:
    """The pods of the overlay, all running."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "group.secret").write_text("0123456789abcdef" * 2)
    wanted = {one.name: one for one in pods(OVERLAY) if one.name in ("engine", "api")}
    slice_ = workers(OVERLAY)
    names = ["engine", "api", *(f"worker-slice-0-{index}" for index in range(slice_.count))]
    with ExitStack() as stack:
        try:
            net = stack.enter_context(network(len(names)))
        except NotHereError as error:
            pytest.skip(f"no network namespaces here: {error}")
        made = {}
        for name, host in zip(names, net.hosts, strict=True):
            lines = [f"{one.address} {known}" for known, one in zip(names, net.hosts, strict=True)]
            Path("/etc/netns", host.name, "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
            made[name] = Pod(name, host, wanted.get(name, slice_).containers, tmp_path, compiled_programs)
            stack.callback(made[name].kill)
        for pod in made.values():
            pod.start()
        yield made


def train(service, make_datum, disturb: Callable[[int], None]) -> list[Any]:
    client = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
    seen: list[Any] = []
    for step in range(5):
        disturb(step)
        loss = client.forward_backward([make_datum(list(range(1 + step, 60)))] * 4, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        seen.append(loss.result().metrics)
    sampler = client.save_weights_and_get_sampling_client().result()
    return [*seen, sampler.compute_logprobs(types.ModelInput.from_ints(list(range(1, 40)))).result()]


def test_four_pods_and_three_kills_change_no_bit(cluster: dict[str, Pod], make_datum) -> None:
    engine, api = cluster["engine"], cluster["api"]
    health = api.containers[-1]["readinessProbe"]["httpGet"]["path"]

    def api_answers() -> bool:
        try:
            return httpx.get(f"http://{api.host.address}:8000{health}").is_success
        except httpx.TransportError:
            return False

    wait_for(lambda: all(pod.is_ready() for name, pod in cluster.items() if name != "api"))
    wait_for(api_answers)
    words = ["tinkerflow", "key", "create", "me"]
    made = engine.run(words, engine.containers[-1], stdout=subprocess.PIPE)
    (key,) = re.findall(r"tml-\S+", made.communicate(timeout=120)[0].decode())

    def disturb(step: int) -> None:
        one, other = cluster["worker-slice-0-2"], cluster["worker-slice-0-0"]
        match step:
            case 1:
                one.kill()
                one.start()
            case 2:
                assert other.drain() == 1
                other.start()
            case 3:
                engine.kill()
                engine.start()

    with tinker.ServiceClient(base_url=f"http://{api.host.address}:8000", api_key=key) as service:
        expected = train(service, make_datum, lambda step: None)
        assert train(service, make_datum, disturb) == expected
