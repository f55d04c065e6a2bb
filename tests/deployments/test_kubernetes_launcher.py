"""What the launcher `kubernetes` asks of the cluster's API, and what it says. With pods: tests/e2e."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytest.importorskip("kubernetes_validate")

from tests.deployments.fake_kubernetes import TOKEN, FakeKubernetes

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.launchers import kubernetes
from tinkerflow.deployments.launchers.kubernetes import Cluster, keep, waited_for
from tinkerflow.deployments.launching import Plan

COMPONENTS = Path(__file__).parents[2] / "deployments" / "kubernetes" / "components"
WORKERS = next(yaml.safe_load_all((COMPONENTS / "workers" / "workers.yaml").read_text()))
ROLE = next(yaml.safe_load_all((COMPONENTS / "launcher" / "role.yaml").read_text()))
READY = {"conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]}


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": status}


@pytest.fixture
def fake() -> FakeKubernetes:
    return FakeKubernetes(copy.deepcopy(WORKERS), ROLE["rules"])


@pytest.fixture
async def cluster(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[Cluster]:
    (tmp_path / "token").write_text(TOKEN)
    transport = httpx.MockTransport(lambda request: fake.answer(request))
    async with httpx.AsyncClient(transport=transport, base_url="https://10.0.0.1") as http:
        yield Cluster(http, "tinkerflow", tmp_path / "token")


def plan(folder: Path, **given: Any) -> Plan:
    return Plan.of(Settings(data_dir=folder, **given), {})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("platform", "resource"), [("cuda", "nvidia.com/gpu"), ("tpu", "google.com/tpu")])
async def test_pods_are_as_the_plan_says(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path, platform: str, resource: str
) -> None:
    asked = plan(tmp_path, processes=2, base_models=("a", "b"), platform=platform, process_devices=4, spread_hosts=True)
    task = asyncio.create_task(keep(asked, print, cluster, 0.01))
    await until(lambda: fake.applied)
    found, before = fake.stateful_set["spec"], WORKERS["spec"]
    assert found["replicas"] == 4
    spec, (container,) = found["template"]["spec"], found["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {resource: 4}}
    (apart,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": before["selector"]}
    del container["resources"], spec["affinity"]
    expected = copy.deepcopy(before["template"])
    del expected["spec"]["containers"][0]["resources"]
    assert found["template"] == expected  # all else stays
    await end(task)


async def test_what_others_change_comes_back_and_pods_are_gone_at_the_end(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    task = asyncio.create_task(keep(plan(tmp_path, processes=2), print, cluster, 0.01))
    await until(lambda: fake.applied)
    assert fake.replicas == 2 and "template" not in kubernetes.stateful_set(plan(tmp_path), 1, {})["spec"]
    fake.stateful_set["spec"]["replicas"] = 7
    await until(lambda: fake.replicas == 2)
    fake.pods = [pod("worker-0", **READY), pod("worker-1", **READY)]
    task.cancel()
    await until(lambda: fake.replicas == 0)
    assert not task.done()  # they still save their models
    fake.pods = []
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("statefulset", r'GET \S+/statefulsets/worker \(404\): statefulsets.apps "worker" not found'),
        ("patch", r'statefulsets.apps "worker" is forbidden: User "\S+" cannot patch resource "statefulsets" in API'),
        ("token", r"\(401\): Unauthorized"),
    ],
)
async def test_a_refusal_is_told_in_the_words_of_the_api(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path, lacking: str, said: str
) -> None:
    match lacking:
        case "statefulset":
            fake.stateful_set = None
        case "patch":
            fake.rules = [rule | {"verbs": [verb for verb in rule["verbs"] if verb != "patch"]} for rule in fake.rules]
        case "token":
            cluster.token.write_text("of yesterday")
    with pytest.raises(UserError, match=said):
        await keep(plan(tmp_path), print, cluster)


def away(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no route to host")


async def test_an_api_that_is_away_ends_no_pod_and_pods_are_released_when_it_is_back(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path, processes=2), said.append, cluster, 0.01))
    await until(lambda: fake.applied)
    with monkeypatch.context() as patches:
        patches.setattr(fake, "answer", away)
        await until(lambda: said and "cannot be reached" in said[-1])
        assert said[-1] == "Kubernetes at https://10.0.0.1 cannot be reached: ConnectError('no route to host')"
        assert fake.replicas == 2 and not task.done()
    await end(task)
    assert fake.replicas == 0


async def test_pods_that_an_idle_release_could_not_reach_are_released_later(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patches:
        patches.setattr(fake, "answer", away)
        task = asyncio.create_task(kubernetes.stay_released(plan(tmp_path), said.append, cluster, 0.01))
        await until(lambda: said)
        assert said[0].startswith("worker pods may be there still: Kubernetes at https://10.0.0.1 cannot be reached")
    await until(lambda: fake.applied)
    assert fake.replicas == 0
    await end(task)


async def test_pods_that_cannot_be_released_are_told(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LEAVE_SECONDS", 0.05)
    said: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path), said.append, cluster))
    await until(lambda: fake.applied)
    monkeypatch.setattr(fake, "answer", lambda request: httpx.Response(503, text="overloaded"))
    await end(task)
    (line,) = said
    assert line.startswith("worker pods are not gone after 0.05 s: Kubernetes refuses GET")
    assert line.endswith("(503): overloaded")


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
BACK_OFF = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "tinkerflow:gpu"'}


@pytest.mark.parametrize(
    ("pods", "count", "lines"),
    [
        ([pod("worker-0", **READY)], 1, []),
        (
            [pod(f"worker-{n}", phase="Pending", conditions=[UNSCHEDULABLE]) for n in range(2)],
            2,
            ["waiting for worker-0, worker-1: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."],
        ),
        (
            [
                pod(
                    "worker-0",
                    phase="Pending",
                    initContainerStatuses=[{"name": "models", "state": {"waiting": BACK_OFF}}],
                )
            ],
            1,
            ['waiting for worker-0: container models: ImagePullBackOff: Back-off pulling image "tinkerflow:gpu"'],
        ),
        (
            [
                pod(
                    "worker-0",
                    phase="Pending",
                    initContainerStatuses=[{"name": "models", "state": {"running": {}}}],
                    containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
                )
            ],
            1,
            ["waiting for worker-0: its init containers run"],
        ),
        (
            [pod("worker-0", phase="Running", containerStatuses=[{"name": "worker", "state": {"running": {}}}])],
            1,
            ["waiting for worker-0: it has not joined the group yet"],
        ),
        (
            [{"metadata": {"name": "worker-0", "deletionTimestamp": "2026-11-25T02:00:00Z"}, "status": READY}],
            1,
            ["waiting for worker-0: it ends"],
        ),
        ([], 2, ['Kubernetes has made 0 of 2 pods: FailedCreate: pods "worker-0" is forbidden: exceeded quota']),
    ],
)
def test_what_pods_wait_for_is_told(pods: list[dict[str, Any]], count: int, lines: list[str]) -> None:
    warnings = [
        {
            "lastTimestamp": "2026-11-25T02:00:07Z",
            "reason": "FailedCreate",
            "message": 'pods "worker-0" is forbidden: exceeded quota',
        },
        {"lastTimestamp": None, "eventTime": "2026-11-25T01:30:00Z"},
        {"lastTimestamp": "2026-11-25T01:00:00Z", "reason": "FailedCreate", "message": "earlier"},
    ]
    assert waited_for(pods, count, warnings) == lines


async def test_pods_that_are_missing_are_told_with_the_reason_of_kubernetes(
    fake: FakeKubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    fake.events = [{"lastTimestamp": None, "reason": "FailedCreate", "message": "exceeded quota: gpus"}]
    said: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path), said.append, cluster, 0.01))
    await until(lambda: said)
    assert said[0] == "Kubernetes has made 0 of 1 pods: FailedCreate: exceeded quota: gpus"
    await end(task)


async def test_outside_of_a_pod_it_says_where_it_must_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(kubernetes, "ACCOUNT", tmp_path)
    with pytest.raises(UserError, match="launcher is 'kubernetes': must run in a pod that has the token"):
        await kubernetes.LAUNCHER.keep(plan(tmp_path), print)
