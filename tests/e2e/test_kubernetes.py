"""Kubernetes overlays, run without a cluster: each pod is a network namespace with its own host name and mounts.

Commands, environments, mounts and the read-only root are rendered by kubectl. Unlike in a cluster, devices are CPUs,
the model is the tiny one, pods share a folder with the store and the journal, Prefect is off, and the user is root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tests.deployments.fake_kubernetes import FakeKubernetes, served
from tests.deployments.test_kubernetes import Pods, environment, objects, pods, workers
from tests.netns import NetHost, Network, NoNetnsError, network
from tests.waiting import wait_for
from tinker import types

from tinkerflow.backend.journal import Journal

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
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
OURS = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}  # the program under test
# $1: name, $2: folder of the pod, $3: folder that pods share, $4: compiled programs; then the command
MOUNTS = """
set -e
name=$1 pod=$2 shared=$3 programs=$4; shift 4
hostname "$name"
mount -t tmpfs none /var/lib && mkdir /var/lib/tinkerflow && mount --bind "$pod/data" /var/lib/tinkerflow
mkdir -p /var/lib/tinkerflow/jax-cache && mount --bind "$programs" /var/lib/tinkerflow/jax-cache
mount --bind "$shared/mnt" /mnt
mount -t tmpfs none /run && mkdir /run/tinkerflow && cp "$shared/group.secret" /run/tinkerflow
if [ -d "$pod/account" ]; then
    mkdir -p /run/secrets/kubernetes.io && cp -r "$pod/account" /run/secrets/kubernetes.io/serviceaccount
fi
mount -o remount,ro /run
mount --bind "$pod/tmp" /tmp
mount -o remount,ro,bind /
cd /
exec "$@"
"""


@dataclass
class Pod:
    """A pod whose containers run one after the other, each in its own PID namespace.

    made_by: the object in the manifests of `overlay` that creates the pod. variables: override the containers' own.
    """

    name: str
    host: NetHost
    overlay: str
    made_by: Pods
    folder: Path
    programs: Path
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def containers(self) -> list[dict[str, Any]]:
        return self.made_by.containers

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def run(self, words: list[str], container: dict[str, Any], **how: Any) -> subprocess.Popen[bytes]:
        given = environment(self.overlay, container)
        variables = given | {name: value for name, value in CHANGED.items() if name in given or "URL" not in name}
        variables |= self.variables
        if "TINKERFLOW_GROUP" in given:
            variables["TINKERFLOW_GROUP"] = given["TINKERFLOW_GROUP"].replace("10.0.0.7", self.host.address)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        alone = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        mounts = ("sh", "-c", MOUNTS, "sh", self.name, self.folder / self.name, self.folder, self.programs)
        return subprocess.Popen(
            ("ip", "netns", "exec", self.host.name, *alone, *mounts, *words),
            env={"PATH": path, "HOME": "/var/lib/tinkerflow", "PYTHONDONTWRITEBYTECODE": "1", **OURS, **variables},
            **how,
        )

    def start(self) -> None:
        for part in {"data", "tmp"} - set(self.made_by.claims):
            shutil.rmtree(self.folder / self.name / part, ignore_errors=True)  # an emptyDir
        for part in ("data", "tmp"):
            (self.folder / self.name / part).mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with (self.folder / f"{self.name}-{self.starts}.log").open("wb") as log:
            *first, last = self.containers
            for container in first:
                assert self.run(container["command"], container, stdout=log, stderr=log).wait() == 0, self.said()
            self.process = self.run(last["command"], last, stdout=log, stderr=log)

    def said(self) -> str:
        return (self.folder / f"{self.name}-{self.starts}.log").read_text()

    def is_ready(self) -> bool:
        probe = self.containers[-1]["readinessProbe"]["exec"]["command"]
        words = ("ip", "netns", "exec", self.host.name, *probe)
        return subprocess.run(words, check=False).returncode == 0

    def kill(self) -> None:
        """Kill the pod as the loss of its node would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def drain(self) -> int:
        """Send SIGTERM to the pod's first process, as kubelet does, and return the exit status."""
        assert self.process is not None
        (first,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        subprocess.run(("kill", "-TERM", first), check=True)
        return self.process.wait(self.made_by.spec["terminationGracePeriodSeconds"])


@contextmanager
def pods_of(*names: str, folder: Path) -> Iterator[Network]:
    """Yield hosts that resolve each other's names, after writing the files that all pods share to `folder`."""
    (folder / "mnt").mkdir()
    (folder / "group.secret").write_text("0123456789abcdef" * 2)
    with ExitStack() as stack:
        try:
            net = stack.enter_context(network(len(names)))
        except NoNetnsError as error:
            pytest.skip(f"no network namespaces here: {error}")
        for host in net.hosts:
            lines = [f"{one.address} {known}" for known, one in zip(names, net.hosts, strict=True)]
            Path("/etc/netns", host.name, "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        yield net


@pytest.fixture
def cluster(tmp_path: Path, compiled_programs: Path) -> Iterator[dict[str, Pod]]:
    """The running pods of a TPU slice's overlay, by name."""
    overlay = "tpu-jobset"
    wanted = {one.name: one for one in pods(overlay) if one.name in ("engine", "api")}
    slice_ = workers(overlay)
    names = ["engine", "api", *(f"worker-slice-0-{index}" for index in range(slice_.count))]
    with pods_of(*names, folder=tmp_path) as net, ExitStack() as stack:
        made = {}
        for name, host in zip(names, net.hosts, strict=True):
            made[name] = Pod(name, host, overlay, wanted.get(name, slice_), tmp_path, compiled_programs)
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


@pytest.mark.thorough
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


@dataclass
class Launched:
    """A cluster that runs the engine's pod, and the StatefulSet's only pod while the launcher requests it.

    kubelet: starts and drains that pod. ended: the pod's exit statuses.
    """

    api: FakeKubernetes
    engine: Pod
    worker: Pod
    kubelet: Future[None]
    ended: list[int]


@pytest.fixture
def launched(tmp_path: Path, compiled_programs: Path) -> Iterator[Launched]:
    overlay, stopping = "launcher", threading.Event()
    made = {one.name: one for one in pods(overlay) if one.name in ("engine", "worker")}
    assert made["engine"].spec["automountServiceAccountToken"] is True
    fake = FakeKubernetes(objects(overlay, "StatefulSet")["worker"], objects(overlay, "Role")["launcher"]["rules"])
    ended: list[int] = []

    def keep(pod: Pod) -> None:
        while not stopping.wait(0.3):
            wanted = fake.replicas if fake.applied else 0
            if wanted and not pod.runs:
                pod.start()
            elif pod.runs and not wanted:
                ended.append(pod.drain())
                pod.process = None
            ready = {"type": "Ready", "status": str(pod.process is not None and pod.is_ready())}
            status = {"metadata": {"name": pod.name}, "status": {"phase": "Running", "conditions": [ready]}}
            fake.pods = [status] if pod.process is not None else []

    with pods_of("engine", "worker-0", folder=tmp_path) as net, ExitStack() as stack:
        port = stack.enter_context(served(fake, net.address, tmp_path / "engine" / "account"))
        variables = {
            "KUBERNETES_SERVICE_HOST": net.address,
            "KUBERNETES_SERVICE_PORT": str(port),
            "TINKERFLOW_HOST": "0.0.0.0",  # there is no pod `api`
            "TINKERFLOW_PROCESS_DEVICES": "0",
            "TINKERFLOW_IDLE_RELEASE": "3",
        }
        engine = Pod("engine", net.hosts[0], overlay, made["engine"], tmp_path, compiled_programs, variables)
        worker = Pod("worker-0", net.hosts[1], overlay, made["worker"], tmp_path, compiled_programs, variables)
        stack.callback(worker.kill)
        stack.callback(engine.kill)
        kubelet = stack.enter_context(ThreadPoolExecutor(1)).submit(keep, worker)
        stack.callback(stopping.set)
        engine.start()
        yield Launched(fake, engine, worker, kubelet, ended)
        stopping.set()
        kubelet.result()


@pytest.mark.thorough
def test_the_launcher_has_pods_while_requests_need_them_and_a_kill_changes_no_bit(
    launched: Launched, tmp_path: Path, make_datum
) -> None:
    engine, worker = launched.engine, launched.worker
    wait_for(lambda: "\nready: " in engine.said() or launched.kubelet.done() or not engine.runs)
    assert "\nready: " in engine.said(), engine.said()
    journal = Journal.open(f"sqlite:///{tmp_path}/mnt/journal.db")
    _, key = journal.keys.create("me", "default", admin=False)
    journal.close()

    def disturb(step: int) -> None:
        match step:
            case 1:
                assert worker.runs
                worker.kill()
            case 3:
                wait_for(lambda: not launched.api.pods)

    with tinker.ServiceClient(base_url=f"http://{engine.host.address}:8000", api_key=key) as service:
        expected = train(service, make_datum, lambda step: None)
        assert train(service, make_datum, disturb) == expected
    assert worker.starts >= 3  # one pod was killed, and one was released
    assert engine.drain() == 0
    assert launched.api.replicas == 0 and not launched.api.pods
    assert set(launched.ended) == {0}
    assert "no request for 3 s: worker processes are released until the next request" in engine.said()
