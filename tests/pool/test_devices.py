"""The detection of a host's accelerators, and their distribution to processes."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.logged import logged_by
from tests.pool.conftest import StartPool

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.pool import jax_setup
from tinkerflow.backend.pool.host import devices
from tinkerflow.backend.pool.host.devices import accelerator, gpu_count, place_in_pod, seen, share
from tinkerflow.backend.pool.jax_setup import check_platform, join_jax, share_of_host
from tinkerflow.backend.pool.protocol.messages import Start
from tinkerflow.backend.spec.commands import GroupConfig


def machine(root: Path, *, gpus: int = 0, tpus: int = 0) -> Path:
    """Create a folder like the root of a machine with these devices, and with a network card from Google."""
    (root / "dev").mkdir()
    for name in ["null", "nvidiactl", "nvidia-uvm"][: 3 if gpus else 1] + [f"nvidia{i}" for i in range(gpus)]:
        (root / "dev" / name).touch()
    for number, kind in enumerate(["0x0042", *["0x0063"] * tpus]):
        (device := root / "sys/bus/pci/devices" / f"0000:00:0{number}.0").mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(f"{kind}\n")
    return root


def test_devices_are_found_by_their_files(tmp_path: Path) -> None:
    (plain, nvidia, tpu) = [tmp_path / name for name in ("plain", "nvidia", "tpu")]
    for folder in (plain, nvidia, tpu):
        folder.mkdir()
    assert (accelerator(machine(plain)), seen(plain)) == ("cpu", "")
    assert (accelerator(machine(nvidia, gpus=12)), seen(nvidia)) == (
        "cuda",
        f"an NVIDIA device ({nvidia / 'dev' / 'nvidia0'})",
    )
    assert (accelerator(machine(tpu, tpus=4)), seen(tpu)) == ("tpu", "4 TPU chip(s)")
    assert [gpu_count({}, root) for root in (plain, nvidia, tpu)] == [0, 12, 0]
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "3,5"}, nvidia) == 2
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "-1"}, nvidia) == gpu_count({"CUDA_VISIBLE_DEVICES": ""}, nvidia) == 0


def test_gpus_of_a_host_are_shared_equally_and_once() -> None:
    assert [share(mine, 4, 8) for mine in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"3 processes of the group on this host share 8 GPU\(s\)"):
        share(0, 3, 8)


def begun(config: GroupConfig, *hosts: int) -> Start:
    return Start(config, len(hosts), "", "pool_executors:Collective", 30.0, hosts)


def test_ranks_of_one_host_take_different_gpus(config: GroupConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    start = begun(config, 0, 0, 2, 0, 0)
    assert [share_of_host(start, rank) for rank in range(5)] == [[0], [1], None, [2], [3]]
    assert share_of_host(begun(replace(config, platform="cpu"), 0, 0), 1) is None
    with pytest.raises(UserError, match="3 processes of the group on this host share 4 GPU"):
        share_of_host(begun(config, 0, 0, 0), 1)
    monkeypatch.setattr(devices, "accelerator", lambda: "tpu")
    with pytest.raises(UserError, match="2 processes of the group are on one TPU host"):
        share_of_host(begun(config, 0, 0), 1)


def test_second_group_on_a_tpu_host_is_refused(config: GroupConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: "tpu")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(UserError, match="2 base models are on one TPU host, where one process uses all chips"):
        join_jax(begun(config, 0).copy_with(groups=2), 0, print)


@pytest.fixture
def metadata() -> Iterator[str]:
    """The address of a metadata server whose answer is worker 11."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.path.endswith("/agent-worker-number") and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if right else 404)
            self.end_headers()
            self.wfile.write(b"11\n")

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_tpu_host_has_its_place_in_the_pod(tmp_path: Path, metadata: str) -> None:
    (tpu, plain) = (tmp_path / "tpu", tmp_path / "plain")
    for folder in (tpu, plain):
        folder.mkdir()
    machine(tpu, tpus=4)
    assert place_in_pod({"TPU_WORKER_ID": "10"}, machine(plain)) == ()
    assert place_in_pod({"TPU_WORKER_ID": "10"}, tpu) == (0, 10)
    assert place_in_pod({"TPU_WORKER_ID": "3", "MEGASCALE_SLICE_ID": "2"}, tpu) == (2, 3)
    assert place_in_pod({"GCE_METADATA_IP": metadata}, tpu) == (0, 11)
    assert place_in_pod({"GCE_METADATA_IP": "127.0.0.1:1"}, tpu) == ()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
async def test_missing_platform_is_named(start_pool: StartPool, config: GroupConfig, platform: str) -> None:
    with pytest.raises(UserError, match=f"platform is '{platform}', and JAX finds no such device here"):
        await start_pool("Collective", config=replace(config, platform=platform))


class Jax:
    """A replacement for the module jax with the given device."""

    def __init__(self, backend: str, asked: str | None = None, capability: str = "8.0") -> None:
        self.default_backend = lambda: backend
        self.local_devices = lambda: [self]
        self.device_kind, self.compute_capability = "Tesla T4", capability
        self.config = type("Config", (), {"jax_platforms": asked})


def test_cpu_fallback_beside_an_accelerator_is_reported(
    config: GroupConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(jax_setup.devices, "seen", lambda: "an NVIDIA device (/dev/nvidia0)")
    check_platform(Jax("cpu"), config, lines.append)
    assert lines and lines[0].startswith("WARNING: this host has an NVIDIA device (/dev/nvidia0), but JAX finds only ")
    assert [record.getMessage() for record in logged_by(caplog, jax_setup)] == lines
    for meant in (Jax("gpu"), Jax("cpu", "cpu")):
        check_platform(meant, config, lines.append)
    check_platform(Jax("cpu"), replace(config, platform="cpu"), lines.append)
    assert len(lines) == 1
    with pytest.raises(UserError, match="platform is 'tpu', but the devices that JAX finds here are 'cuda'; install"):
        check_platform(Jax("gpu"), replace(config, platform="tpu"), lines.append)


def test_gpu_older_than_turing_is_refused(config: GroupConfig) -> None:
    with pytest.raises(UserError, match=r"has compute capability 7\.0: must be 7\.5 \(Turing\) or higher"):
        check_platform(Jax("gpu", capability="7.0"), config, print)
    for capability in ("7.5", "8.0", "10.0", "12.1", "gfx942"):
        check_platform(Jax("gpu", capability=capability), config, print)


def test_gpu_without_float8_is_refused_for_a_float8_cache(config: GroupConfig) -> None:
    small = replace(config, kv_cache="float8")
    with pytest.raises(
        UserError, match=r"kv_cache is 'float8', which needs compute capability 8\.9 .+ Tesla T4 has 8\.0"
    ):
        check_platform(Jax("gpu", capability="8.0"), small, print)
    with pytest.raises(UserError, match=r"and Tesla T4 has 7\.5"):
        check_platform(Jax("gpu", capability="7.5"), small, print)
    for capability in ("8.9", "9.0", "12.1"):
        check_platform(Jax("gpu", capability=capability), small, print)


def test_a_missing_platform_of_jax_platforms_is_named(config: GroupConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise AssertionError  # as JAX does with its plugin but without a GPU

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    jax = Jax("")
    jax.default_backend = missing
    with pytest.raises(UserError, match="JAX_PLATFORMS is 'cuda', and JAX finds no such device here"):
        check_platform(jax, config, print)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(AssertionError):
        check_platform(jax, config, print)
