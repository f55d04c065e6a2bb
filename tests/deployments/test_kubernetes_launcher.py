"""The launcher `kubernetes` against the client's mock transport. With real pods: tests/e2e/test_kubernetes.py."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waiting import until

pytest.importorskip("kubernetes_validate")
pytest.importorskip("lightkube")

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.config.models import Cluster, User
from lightkube.resources.core_v1 import Event, Pod
from tests.deployments.fake_kubernetes import TOKEN, FakeKubernetes

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.launchers import kubernetes
from tinkerflow.deployments.launchers.kubernetes import keep, waiting_lines
from tinkerflow.deployments.launching import Plan

COMPONENTS = Path(__file__).parents[2] / "deployments" / "kubernetes" / "components"
WORKERS = next(yaml.safe_load_all((COMPONENTS / "workers" / "workers.yaml").read_text()))
ROLE = next(yaml.safe_load_all((COMPONENTS / "launcher" / "role.yaml").read_text()))
READY = {"conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]}
AWAY = httpx2.ConnectError("no route to host")
QUICK = 0.01  # seconds between checks


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": status}


def container(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "state": state, "image": "", "imageID": "", "ready": False, "restartCount": 0}


def event(**fields: Any) -> dict[str, Any]:
    return {"metadata": {}, "involvedObject": {}, "lastTimestamp": None, **fields}


@pytest.fixture
def fake() -> FakeKubernetes:
    return FakeKubernetes(copy.deepcopy(WORKERS), ROLE["rules"])


@pytest.fixture
async def client(fake: FakeKubernetes) -> AsyncIterator[AsyncClient]:
    config = KubeConfig.from_one(
        cluster=Cluster(server="https://10.0.0.1"), user=User(token=TOKEN), namespace="tinkerflow"
    )
    async with AsyncClient(config, transport=httpx2.MockTransport(fake.respond)) as client:
        yield client


def plan(folder: Path, **given: Any) -> Plan:
    return Plan.of(Settings(data_dir=folder, **given), {})


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("platform", "resource"), [("cuda", "nvidia.com/gpu"), ("tpu", "google.com/tpu")])
async def test_pods_match_the_plan(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path, platform: str, resource: str
) -> None:
    given = plan(tmp_path, processes=2, base_models=("a", "b"), platform=platform, process_devices=4, spread_hosts=True)
    assert await kubernetes.scale(client, given, 4) == WORKERS["spec"]["selector"]["matchLabels"]
    expected = copy.deepcopy(WORKERS)
    spec = expected["spec"]["template"]["spec"]
    spec["containers"][0]["resources"]["limits"] = {resource: 4}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": WORKERS["spec"]["selector"]}
    spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    expected["spec"]["replicas"] = 4
    assert fake.stateful_set == expected
    assert "template" not in kubernetes.stateful_set(plan(tmp_path), 1, {})["spec"]


async def test_foreign_changes_are_undone_and_all_pods_are_removed_at_the_end(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path
) -> None:
    task = asyncio.create_task(keep(plan(tmp_path, processes=2), print, client, QUICK))
    await until(lambda: fake.applied and fake.replicas == 2)
    assert fake.stateful_set is not None
    fake.stateful_set["spec"]["replicas"] = 7
    await until(lambda: fake.replicas == 2)
    fake.pods = [pod("worker-0", **READY), pod("worker-1", **READY)]
    task.cancel()
    await until(lambda: fake.replicas == 0)
    assert not task.done(), "pods still save their models"
    fake.pods = []
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("statefulset", r'GET \S+/statefulsets/worker \(404\): statefulsets.apps "worker" not found'),
        ("patch", r'PATCH .* \(403\): statefulsets "worker" is forbidden: cannot patch resource "statefulsets"'),
        ("token", r"\(401\): Unauthorized"),
    ],
)
async def test_refusal_has_the_message_of_the_kubernetes_api(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path, lacking: str, message: str
) -> None:
    match lacking:
        case "statefulset":
            fake.stateful_set = None
        case "patch":
            fake.rules = [rule | {"verbs": [verb for verb in rule["verbs"] if verb != "patch"]} for rule in fake.rules]
        case "token":
            fake.outage = httpx2.Response(401, json={"message": "Unauthorized"})
    with pytest.raises(UserError, match=message):
        await keep(plan(tmp_path), print, client)


async def test_api_outage_ends_no_pod_and_delays_releases(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path
) -> None:
    lines: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path, processes=2), lines.append, client, QUICK))
    await until(lambda: fake.applied)
    fake.outage = AWAY
    await until(lambda: lines and "cannot be reached: ConnectError('no route to host')" in lines[-1])
    assert fake.replicas == 2 and not task.done()
    fake.outage = None
    await end(task)
    assert fake.replicas == 0
    fake.applied, fake.outage = 0, AWAY
    task = asyncio.create_task(kubernetes.stay_released(plan(tmp_path), lines.append, client, QUICK))
    await until(lambda: lines[-1].startswith("worker pods may still exist: Kubernetes cannot be reached"))
    fake.outage = None
    await until(lambda: fake.applied)
    await end(task)


async def test_pods_that_cannot_be_released_are_reported(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LEAVE_SECONDS", 0.05)
    lines: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path), lines.append, client))
    await until(lambda: fake.applied)
    fake.outage = httpx2.Response(503, text="overloaded")
    await end(task)
    (line,) = lines
    assert line.startswith("worker pods still exist after 0.05 s: Kubernetes refuses GET")
    assert line.endswith("(503): overloaded")


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
STARTING = {"waiting": {"reason": "PodInitializing"}}


@pytest.mark.parametrize(
    ("statuses", "count", "lines"),
    [
        ([READY], 1, []),
        (
            [{"phase": "Pending", "conditions": [UNSCHEDULABLE]}] * 2,
            2,
            ["waiting for worker-0, worker-1: Unschedulable: 0/3 nodes"],
        ),
        (
            [{"phase": "Pending", "initContainerStatuses": [container("models", BACK_OFF)]}],
            1,
            ["waiting for worker-0: container models: ImagePullBackOff: Back-off pulling image"],
        ),
        (
            [
                {
                    "phase": "Pending",
                    "initContainerStatuses": [container("models", {"running": {}})],
                    "containerStatuses": [container("worker", STARTING)],
                }
            ],
            1,
            ["waiting for worker-0: its init containers are running"],
        ),
        (
            [{"phase": "Running", "containerStatuses": [container("worker", {"running": {}})]}],
            1,
            ["waiting for worker-0: it has not joined the group yet"],
        ),
        ([], 2, ["Kubernetes has created 0 of 2 pods: FailedCreate: exceeded quota"]),
    ],
)
def test_reasons_of_waiting_pods_are_reported(statuses: list[dict[str, Any]], count: int, lines: list[str]) -> None:
    warnings = [
        event(lastTimestamp="2026-11-25T02:00:07Z", reason="FailedCreate", message="exceeded quota"),
        event(eventTime="2026-11-25T01:30:00.000000Z"),
        event(lastTimestamp="2026-11-25T01:00:00Z", reason="FailedCreate", message="earlier"),
    ]
    pods = [Pod.from_dict(pod(f"worker-{number}", **status)) for number, status in enumerate(statuses)]
    assert waiting_lines(pods, count, [Event.from_dict(warning) for warning in warnings]) == lines


def test_a_pod_that_ends_is_waited_for() -> None:
    ending = {"metadata": {"name": "worker-0", "deletionTimestamp": "2026-11-25T02:00:00Z"}, "status": READY}
    assert waiting_lines([Pod.from_dict(ending)], 1, []) == ["waiting for worker-0: it is being deleted"]


async def test_missing_pods_are_reported_with_the_reason_of_kubernetes(
    fake: FakeKubernetes, client: AsyncClient, tmp_path: Path
) -> None:
    fake.events = [event(reason="FailedCreate", message="exceeded quota: gpus")]
    lines: list[str] = []
    task = asyncio.create_task(keep(plan(tmp_path), lines.append, client, QUICK))
    await until(lambda: lines)
    assert lines[0] == "Kubernetes has created 0 of 1 pods: FailedCreate: exceeded quota: gpus"
    await end(task)


async def test_outside_of_a_pod_the_error_names_where_it_must_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="launcher 'kubernetes': must run in a pod that has the token"):
        await kubernetes.LAUNCHER.keep(plan(tmp_path), print)
