"""The manifests of `deployments/kubernetes`, as kubectl renders them. No cluster runs them here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import prefect.settings
import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.docs.generate import command_line

from tinkerflow.backend.pool import HostConfig
from tinkerflow.backend.settings import Settings
from tinkerflow.deployments.keeper import STOP_SECONDS
from tinkerflow.deployments.launchers.kubernetes import LEAVE_SECONDS
from tinkerflow.flows.engine import DRAIN_SECONDS

kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deployments" / "kubernetes"
OVERLAYS = sorted(path.name for path in (HERE / "overlays").iterdir())
VERSION = "1.37"
ON_CPUS = ("cpu", "schedules")  # overlays whose workers use the image of the API
DATABASE = "postgresql://tinkerflow:secret@postgres/tinkerflow"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
of_each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def shape(*required: str, **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object without other properties."""
    return {"type": "object", "required": [*required], "additionalProperties": False, "properties": properties}


NUMBER = {"type": "integer", "minimum": 0}
SUBDOMAIN = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
JOB = shape("name", "template", name={"type": "string"}, replicas=NUMBER, template={"required": ["spec"]})
# The fields of the JobSet's CRD (jobset.x-k8s.io/v1alpha2) that we use; its jobs are checked as Jobs.
JOBSET = shape(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object"},
    spec=shape(
        "replicatedJobs",
        network=shape(
            enableDNSHostnames={"type": "boolean"}, subdomain=SUBDOMAIN, publishNotReadyAddresses={"type": "boolean"}
        ),
        failurePolicy=shape(maxRestarts=NUMBER),
        replicatedJobs={"type": "array", "minItems": 1, "items": JOB},
    ),
)


@dataclass(frozen=True)
class Pods:
    """The pods of one object: its kind and name, and their count, labels, specification and volume claims."""

    kind: str
    name: str
    count: int
    labels: dict[str, str]
    spec: dict[str, Any]
    claims: tuple[str, ...] = ()

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def are(self, selector: dict[str, Any]) -> bool:
        """Whether a label selector matches them."""
        labels = selector.get("matchLabels", {})
        rules = selector.get("matchExpressions", [])
        assert all(rule["operator"] == "In" for rule in rules)
        return labels.items() <= self.labels.items() and all(
            self.labels.get(rule["key"]) in rule["values"] for rule in rules
        )


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    """The objects of an overlay. overlay: its name, or the path of a folder elsewhere."""
    words = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", HERE / "overlays" / overlay]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return list(yaml.safe_load_all(done.stdout))


def objects(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind, by their names."""
    return {one["metadata"]["name"]: one for one in rendered(overlay) if one["kind"] == kind}


def pods(overlay: str) -> Iterator[Pods]:
    for one in rendered(overlay):
        kind, name, spec = one["kind"], one["metadata"]["name"], one.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            template = spec["template"]
            claims = tuple(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
            count = spec.get("replicas", 1)
            yield Pods(kind, name, count, template["metadata"]["labels"], template["spec"], claims)
        elif kind == "JobSet":
            for job in spec["replicatedJobs"]:
                inner = job["template"]["spec"]
                template = inner["template"]
                count = job.get("replicas", 1) * inner["completions"]
                yield Pods(kind, name, count, template["metadata"]["labels"], template["spec"])


def workers(overlay: str) -> Pods:
    (found,) = (one for one in pods(overlay) if one.name == "worker")
    return found


def environment(overlay: str, container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, whose pod has the address 10.0.0.7."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= objects(overlay, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    known = {"status.podIP": "10.0.0.7", ("database", "url"): DATABASE, ("database", "password"): "secret"}
    known["prefect", "password"] = "tinkerflow:secret"
    known["serve", "api-key"] = "tml-secret"
    for entry in container.get("env", ()):
        match entry:
            case {"value": str(value)}:
                found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                found[entry["name"]] = known[path]
            case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                found[entry["name"]] = known[name, key]
            case _:
                raise AssertionError(entry)
    return found


def commands(container: dict[str, Any]) -> list[list[str]]:
    """The commands of a container. If it starts a shell, these are the commands of the shell's script."""
    words = container.get("command", [])
    if words[:2] == ["sh", "-c"]:
        return [line.split("&")[0].split() for line in words[2].splitlines() if line.startswith("tinkerflow ")]
    return [words] if words else []


def page() -> str:
    """The page about Kubernetes, with each command on one line."""
    return (ROOT / "docs" / "kubernetes.md").read_text().replace("\\\n", "")


def given_secrets() -> set[tuple[str, str]]:
    """(name, key) of each secret that the page creates."""
    found = re.findall(r"create secret generic (\w+) (.*)", page())
    return {(name, key) for name, rest in found for key in re.findall(r"--from-(?:literal|file)=([\w.-]+)=", rest)}


@of_each_overlay
def test_rendered_objects_are_valid(overlay: str) -> None:
    for one in rendered(overlay):
        if one["kind"] != "JobSet":
            kubernetes_validate.validate(one, VERSION, strict=True)
            continue
        Draft202012Validator(JOBSET).validate(one)
        for job in one["spec"]["replicatedJobs"]:
            inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
            kubernetes_validate.validate(inner, VERSION, strict=True)
            most = f"{one['metadata']['name']}-{job['name']}-{job['replicas']}-{inner['spec']['completions']}"
            assert len(most) < 63 - len("-12345")  # a pod's name gets a suffix


@of_each_overlay
def test_referenced_names_exist(overlay: str) -> None:
    secrets = given_secrets()
    for one in pods(overlay):
        account = one.spec.get("serviceAccountName")
        assert account is None or account in objects(overlay, "ServiceAccount")
        volumes = {volume["name"]: volume for volume in one.spec.get("volumes", ())}
        for volume in volumes.values():
            match volume:
                case {"secret": {"secretName": name, "defaultMode": mode}}:
                    assert mode & 0o007 == 0, "readable by the pod's user and group only"
                    assert name in {known for known, _ in secrets}
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert name in objects(overlay, "PersistentVolumeClaim")
                case {"configMap": {"name": name}}:
                    assert f"create configmap {name} " in page()
                case _:
                    assert "emptyDir" in volume
        for container in one.containers:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= volumes.keys() | set(one.claims)
            for entry in container.get("env", ()):
                if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                    assert (reference["name"], reference["key"]) in secrets
        if one.kind == "StatefulSet":
            assert objects(overlay, "StatefulSet")[one.name]["spec"]["serviceName"] in objects(overlay, "Service")
        if one.kind != "JobSet":
            assert one.are(objects(overlay, one.kind)[one.name]["spec"]["selector"])


@of_each_overlay
def test_selectors_and_ports_meet_pods(overlay: str) -> None:
    for name, service in objects(overlay, "Service").items():
        found = [one for one in pods(overlay) if one.are({"matchLabels": service["spec"]["selector"]})]
        assert [one.name for one in found] == [name]
        ports = {port["name"] for container in found[0].spec["containers"] for port in container.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} <= ports
    for budget in objects(overlay, "PodDisruptionBudget").values():
        (found_pods,) = (one for one in pods(overlay) if one.are(budget["spec"]["selector"]))
        if found_pods.kind == "JobSet":  # Kubernetes accepts nothing else for pods of Jobs
            assert budget["spec"]["minAvailable"] == found_pods.count - 1
    for policy in objects(overlay, "NetworkPolicy").values():
        named = [one for one in pods(overlay) if one.are(policy["spec"]["podSelector"])]
        assert named
        for rule in policy["spec"].get("ingress", ()):
            for port in rule.get("ports", ()):
                assert port["port"] in {p["name"] for c in named[0].spec["containers"] for p in c["ports"]}


@of_each_overlay
def test_only_pods_of_the_group_reach_its_ports(overlay: str) -> None:
    policies = objects(overlay, "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    group = {one.name for one in pods(overlay) if one.labels.get("tinkerflow/group") == "main"}
    assert group == {"engine", "worker"}
    opening = [p["spec"] for name, p in policies.items() if name != "default-deny"]
    for one in (one for one in pods(overlay) if one.name in group):
        (policy,) = (spec for spec in opening if one.are(spec["podSelector"]))
        assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": {"tinkerflow/group": "main"}}}]}]


@of_each_overlay
def test_commands_and_settings_exist(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = command_line()
    for name in [name for name in os.environ if name.startswith(("TINKERFLOW_", "PREFECT_"))]:
        monkeypatch.delenv(name)
    for one in pods(overlay):
        assert one.name == "engine" or not one.spec.get("automountServiceAccountToken")
        for container in one.containers:
            for words in commands(container):
                if words[0] == "tinkerflow":
                    path = next(path for path in (" ".join(words[:n]) for n in (3, 2)) if path in known)
                    known[path].make_context(path, words[len(path.split()) :])
            variables = environment(overlay, container)
            for name in variables:
                if name.startswith("PREFECT_"):
                    assert getattr(prefect.settings, name).name == name
            if container["name"] not in ("api", "engine", "serve", "worker", "models"):
                continue
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                settings = Settings()  # refuses unknown variables
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {str(settings.data_dir), "/tmp"} <= mounts
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            if container["name"] == "api":
                assert (ports["http"], settings.database_url) == (settings.port, DATABASE)
                assert settings.host == "0.0.0.0"
            if container["name"] == "engine":
                assert settings.group == f"10.0.0.7:{ports['group']}"
                assert settings.database_url == DATABASE
                assert settings.processes == workers(overlay).count
                launched = settings.launcher == "kubernetes"
                assert launched == (words == ["tinkerflow", "up"]) == (overlay == "launcher")
                assert launched is one.spec.get("automountServiceAccountToken", False)
            if container["name"] in ("engine", "worker"):
                assert ("group", settings.group_secret_path.name) in given_secrets()
                assert str(settings.group_secret_path.parent) in mounts
            if settings.store_url.startswith("file:///store") and container["name"] != "models":
                assert "/store" in mounts


@of_each_overlay
def test_addresses_belong_to_services(overlay: str) -> None:
    services = {
        f"{name}:{port['port']}"
        for name, service in objects(overlay, "Service").items()
        for port in service["spec"].get("ports", ())
    }
    (worker,) = commands(workers(overlay).spec["containers"][0])
    assert worker[worker.index("--group") + 1] in services
    (settings,) = objects(overlay, "ConfigMap").values()
    assert re.fullmatch(r"http://(.*)/api", settings["data"]["PREFECT_API_URL"])[1] in services
    assert "postgres:5432" in services


@of_each_overlay
def test_containers_have_restricted_privileges(overlay: str) -> None:
    for one in pods(overlay):
        assert one.spec["securityContext"]["runAsNonRoot"] is True
        assert one.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one.spec["enableServiceLinks"] is False  # TINKERFLOW_API_PORT would be an unknown setting
        for container in one.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@of_each_overlay
def test_pods_have_enough_time_to_terminate(overlay: str) -> None:
    grace = {one.name: one.spec["terminationGracePeriodSeconds"] for one in pods(overlay)}
    assert grace["worker"] >= HostConfig.leave_seconds + 20
    assert grace["engine"] >= DRAIN_SECONDS + HostConfig.leave_seconds + 20


@of_each_overlay
def test_images_are_targets_of_the_dockerfile(overlay: str) -> None:
    targets = set(re.findall(r"^FROM system AS (\w+)", (ROOT / "deployments" / "Dockerfile").read_text(), re.M))
    devices: dict[str, set[str]] = {"cpu": set(), "gpu": {"nvidia.com/gpu"}, "tpu": {"google.com/tpu"}}
    for one in pods(overlay):
        for container in one.containers:
            name, _, tag = container["image"].partition(":")
            own = "tinkerflow-worker" if one.name == "worker" and overlay not in ON_CPUS else "tinkerflow"
            assert name == "postgres" or (name == own and tag in targets)
            if name != "postgres" and container["name"] != "models":
                assert set(container["resources"].get("limits", {})) - {"memory"} == devices[tag]


@of_each_overlay
def test_an_overlay_of_the_tutorial_gives_each_container_its_image(overlay: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorials" / "production-on-kubernetes.md").read_text()
    whole, gpu = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S))
    if overlay not in ON_CPUS:
        whole |= gpu
    whole["resources"] = [f"upstream/overlays/{overlay}"]
    if overlay.endswith("-jobset"):  # the store is a bucket
        whole["patches"] = [patch for patch in whole["patches"] if patch["target"]["kind"] != "PersistentVolumeClaim"]
    (tmp_path / "upstream").symlink_to(HERE)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    ours = str(tmp_path)
    for one in pods(ours):
        tag = "gpu" if one.name == "worker" and overlay not in ON_CPUS else "cpu"
        image = "postgres:17" if one.name == "postgres" else f"registry.example.org/team/tinkerflow:0.2.0-{tag}"
        assert {container["image"] for container in one.containers} == {image}, one.name
        if one.name in ("api", "engine", "worker"):
            assert environment(ours, one.containers[-1])["TINKERFLOW_MAX_CONTEXT"] == "4096"
        if one.name == "engine":
            assert one.spec["containers"][0]["resources"]["limits"]["memory"] == "16Gi"
    for claim in objects(ours, "PersistentVolumeClaim").values():
        assert claim["spec"]["resources"]["requests"]["storage"] == "500Gi"


def test_the_operator_of_prometheus_gets_the_rules_and_their_job(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(\(printf.*?)```", (ROOT / "docs" / "monitoring.md").read_text(), re.S)
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    made = yaml.safe_load((tmp_path / "prometheus-rule.yaml").read_text())
    rules = (ROOT / "deployments" / "prometheus-rules.yaml").read_text()
    assert (made["kind"], made["spec"]) == ("PrometheusRule", yaml.safe_load(rules))
    (label,) = re.findall(r"jobLabel: (\S+)", (ROOT / "docs" / "kubernetes.md").read_text())
    (api,) = (one for one in pods("cpu") if one.name == "api")
    assert set(re.findall(r'job="(\w+)"', rules)) == {api.labels[label]}


def test_launcher_settings_stay_out_of_its_manifest() -> None:
    (settings,) = objects("launcher", "ConfigMap").values()
    assert {"TINKERFLOW_MAX_GROUPS", "TINKERFLOW_PROCESS_DEVICES", "TINKERFLOW_IDLE_RELEASE"} <= settings["data"].keys()
    worker = objects("launcher", "StatefulSet")["worker"]["spec"]
    assert "replicas" not in worker  # kubectl apply would reset it
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert str(limits["nvidia.com/gpu"]) == settings["data"]["TINKERFLOW_PROCESS_DEVICES"]  # of the first pod, too
    binding = objects("launcher", "RoleBinding")["launcher"]
    assert binding["roleRef"]["name"] in objects("launcher", "Role")
    (engine,) = (one for one in pods("launcher") if one.name == "engine")
    assert [one["name"] for one in binding["subjects"]] == [engine.spec["serviceAccountName"]]
    assert engine.spec["terminationGracePeriodSeconds"] >= 2 * STOP_SECONDS + LEAVE_SECONDS  # API, engine, worker pods


def test_every_component_is_used() -> None:
    text = "".join((HERE / "overlays" / overlay / "kustomization.yaml").read_text() for overlay in OVERLAYS)
    assert set(re.findall(r"\.\./components/([\w-]+)", text)) == {one.name for one in (HERE / "components").iterdir()}


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name.endswith("jobset")])
def test_sigterm_makes_a_job_worker_save_and_then_fail(overlay: str, tmp_path: Path) -> None:
    program = tmp_path / "tinkerflow"
    program.write_text(
        f"#!{sys.executable}\nimport signal, time\n"
        "def save(*_):\n    time.sleep(0.5)\n    open('saved', 'w')\n    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('joined', flush=True)\nsignal.pause()\n"
    )
    program.chmod(0o755)
    words = workers(overlay).spec["containers"][0]["command"]
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path, env=path, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "joined\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.wait(30) == 1
    assert (tmp_path / "saved").exists()


_SOCKETS = """
import json, socket, subprocess, sys
engine, worker = json.loads(sys.argv[1])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
say = lambda: print(*(subprocess.run(words).returncode for words in (engine, worker)), flush=True)
say()
with socket.create_server(("127.0.0.1", 7000)):
    say()
    with socket.create_connection(("127.0.0.1", 7000)):
        say()
"""


def test_probes_see_listening_and_joined_processes() -> None:
    def probe(name: str) -> list[str]:
        (found,) = (one for one in pods("cpu") if one.name == name)
        (container,) = found.spec["containers"]
        assert container["startupProbe"]["exec"] == container["readinessProbe"]["exec"]
        words: list[str] = container["readinessProbe"]["exec"]["command"]
        return words

    alone = ["unshare", "--map-root-user", "--net"]  # a network without other servers
    if shutil.which("ip") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no network namespaces")
    words = [*alone, sys.executable, "-c", _SOCKETS, json.dumps([probe("engine"), probe("worker")])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["1 1", "0 1", "0 0", ""]
