"""What all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import absl.logging
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from tests import process_state
from tests.compiled import forget_programs

from tinkerflow.backend.core.disk import make_folder, make_private
from tinkerflow.backend.supervise.processes import memory_maps_used

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ROOM = Path(__file__).parent
WITHOUT_TORCH = str(ROOM / "without_torch")
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
gc.set_threshold(50_000, 20, 50)  # while tests are collected, too: a sixth of that time was the search for garbage
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["DO_NOT_TRACK"] = "1"  # as our commands set it for Prefect
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as in our commands
os.environ["TINKERFLOW_WARM_UP"] = "false"  # services of the tests compile what they need; test_warming.py is of it
# Prefect's set-up of logging closes the stream of absl's handler, which would be the stream of pytest's capture.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
USES_THE_SDK = {"api", "cassettes", "compat", "e2e"}
# What `--fast` leaves out, by folder or file: what starts services, worker groups or databases, and what compiles much.
NOT_FAST = (
    *("accelerators", "benchmarks", "compat", "e2e", "flows", "pool", "compute/sampler"),
    *(f"compute/test_{name}.py" for name in ("executor", "experts", "mesh", "parity", "platforms")),
    *(f"compute/test_{name}.py" for name in ("quantized", "registry", "warming")),
    *(f"compute/training/test_{name}.py" for name in ("custom_losses", "masked_tokens", "train", "train_work")),
    *(f"api/test_{name}.py" for name in ("fuzz", "limits", "sdk", "serve", "tenants", "traps")),
    *(f"deployments/test_{name}.py" for name in ("keeper", "tiny_model", "up")),
    *(f"deployments/cassettes/test_{name}.py" for name in ("programs", "replay")),
)
# Where programs are compiled as users run them: tests of bits, of compiled programs, of many steps, and of the README's
# commands. Elsewhere they are compiled without most optimizations, in a third of the time.
AS_USERS_RUN_IT = (
    *("accelerators", "benchmarks", "compute/test_matmul.py"),
    *(f"compute/sampler/test_{name}.py" for name in ("bits", "drift_alarms")),
    *(f"compute/training/test_{name}.py" for name in ("bits", "optimizer", "train_work")),
    *(f"e2e/test_{name}.py" for name in ("crash_loop", "quickstart", "readme", "wheel")),
)
# Files whose tests share a service. One process runs all files of a line, and starts their service once.
_CLIENTS = ("chat", "console", "constraints", "cookbook", "history", "images", "losses", "optimizers", "sampling")
_PIPELINES = ("learning", "nightly", "prefect_page", "served", "sft")
SHARE_A_SERVICE = (
    ("tests/compat/",),
    tuple(f"tests/e2e/test_{name}.py" for name in (*_CLIENTS, "sdk_loop", "streams", "tenants", "weights")),
    tuple(f"tests/e2e/test_{name}.py" for name in _PIPELINES),
    ("tests/e2e/test_environments.py", "tests/e2e/test_rewards.py"),
)
LONGEST = ("tests/e2e/test_tutorials.py", *SHARE_A_SERVICE[2])  # they begin first of those that use the SDK
# Rooms whose tests must leave the process unchanged; the others have not been run with this check yet.
GUARDED = ("core", "deployments", "supervise", "tasks", "tracking")
_QUICK_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
CROWDED = 0.3  # of a process's memory maps: behind a file, all compiled programs are forgotten


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what starts services or compiles much")
    parser.addoption("--thorough", action="store_true", help="run the tests that are marked as thorough, too")
    parser.addoption("--families", action="store_true", help="run the parity tests for every model family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rooms that use the SDK come last, and an open socket is no error there.

    `--fast` drops slow tests, and only `--thorough` keeps thorough tests. The SDK leaves daemon threads running, and
    closes some connections only when they are collected, which may be in the middle of any later test.
    """
    kept, dropped = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if _is_chosen(item, config) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = sorted(kept, key=lambda item: (_uses_the_sdk(item), not item.nodeid.startswith(LONGEST)))
    for item in filter(_uses_the_sdk, items):
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(
            pytest.mark.filterwarnings("ignore:Exception ignored in. <:pytest.PytestUnraisableExceptionWarning")
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, and the files of `SHARE_A_SERVICE` together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return next((files[0] for files in SHARE_A_SERVICE if path.startswith(files)), path)

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there before the first test stays: garbage is not looked for in it, nor so often; a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unchanged_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves the state of the process changed. Fixtures of a wider scope may change it."""
    before, packages = process_state.snapshot(), process_state.packages()
    yield
    if request.path.is_relative_to(ROOM) and request.path.relative_to(ROOM).parts[0] not in GUARDED:
        return
    imported = process_state.packages() - packages
    if left := process_state.changes(before, process_state.snapshot(), imported):
        pytest.fail("the test leaves the process changed; use monkeypatch: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def quick_options(compiled_programs: Path) -> Iterator[list[tuple[str, Any]]]:
    """XLA's options to compile quickly, also for the processes that tests start. Each program is compiled once.

    XLA compiles without its fusion emitters, which take a third of the time that is left, and each program as one
    piece. JAX has no options for these. Started processes have no torch, which the SDK would import for seconds.
    """
    import jax
    from jax._src import compiler
    from jax.experimental.compilation_cache import compilation_cache

    from tinkerflow.backend.compute.platforms import known_flags

    jax.config.update("jax_compilation_cache_dir", str(compiled_programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # JAX decides at its first program whether it uses the folder
    flags = [f"--{name}={str(value).lower()}" for name, value in _QUICK_OPTIONS.items()]
    known = known_flags(flags, ("jaxlib/libjax_common.so",))  # XLA of JAX 0.11 lacks one of them
    compiler.get_compile_options(1, 1)  # reads XLA_FLAGS, once: what follows is for the processes that tests start
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (WITHOUT_TORCH, os.environ.get("PYTHONPATH")))))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        patch.setenv("XLA_FLAGS", " ".join([XLA_FLAGS, *compress(flags, known)]))
        yield list(compress(_QUICK_OPTIONS.items(), known))


@pytest.fixture(autouse=True, scope="module")
def compiler(request: pytest.FixtureRequest, quick_options: list[tuple[str, Any]]) -> Iterator[None]:
    """How much JAX optimizes in a file's tests, here and in the processes that they start."""
    import jax
    from jax._src import compiler

    path = request.path.relative_to(ROOM).as_posix()
    quickly = not path.startswith(AS_USERS_RUN_IT)
    quickly &= "xla_cpu_max_isa" not in XLA_FLAGS  # .ci/run looks at what other CPUs compute
    usual = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = usual(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, *quick_options]
        return made

    if not quickly:
        forget_programs()  # those of files before may be compiled quickly
    with pytest.MonkeyPatch.context() as patch:
        jax.config.update("jax_disable_most_optimizations", quickly)
        if quickly:
            patch.setattr(compiler, "get_compile_options", options)
        else:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
            patch.setenv("XLA_FLAGS", XLA_FLAGS)
        yield
    if not quickly or memory_maps_used() > CROWDED:
        forget_programs()


@pytest.hookimpl(tryfirst=True)  # before plugins that import at this moment: an error within a collection ends that
def pytest_sessionfinish() -> None:
    """Collect what the SDK left open while that is no error: pytest collects once more after this, and it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """The spans of this process, which are made as long as the test runs."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tinkerflow.backend.core import tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


@pytest.fixture(scope="session")
def compiled_programs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JAX's compilation cache that all tests share: most of them compile the same few programs."""
    cache = getattr(pytestconfig, "cache", None)  # none with `-p no:cacheprovider`
    return cache.mkdir("jax") if cache is not None else tmp_path_factory.mktemp("jax")


@pytest.fixture(scope="session")
def prefect_database(compiled_programs: Path) -> Callable[[Path], None]:
    """prefect_database(data_dir) puts an empty database there, which a Prefect server would need 4 s to create."""
    made = compiled_programs.with_name(f"prefect-{version('prefect')}.db")
    with FileLock(f"{made}.lock"):
        if not made.exists():
            database = {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{made}.new"}
            command = (sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y")
            subprocess.run(command, env=os.environ | database, check=True, capture_output=True)
            Path(f"{made}.new").rename(made)

    def copy(data_dir: Path) -> None:
        make_folder(data_dir / "prefect")
        shutil.copyfile(made, data_dir / "prefect" / "prefect.db")
        make_private(data_dir / "prefect" / "prefect.db")

    return copy


@pytest.fixture(scope="session")
def postgres_database() -> Iterator[Callable[[str], str]]:
    """postgres_database(name): the URL of a new database, on a server that is there as long as the tests run."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as runtime,
    ):
        patch.setenv("XDG_RUNTIME_DIR", runtime)  # platformdirs warns unless it is a folder of mode 0700
        pgserver = pytest.importorskip("pgserver")  # no wheels for Python 3.13
        import psycopg

        server = pgserver.get_server(folder)
        url: str = server.get_uri()

        def make(name: str) -> str:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
            return url.replace("/postgres?", f"/{name}?")

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # stopping syncs every database: half a minute here
            connection.execute("SELECT pg_reload_conf()")
        try:
            yield make
        finally:
            server.cleanup()


def _is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    if item.get_closest_marker("thorough") is not None and not config.getoption("--thorough"):
        return False
    return _is_fast(item) or not config.getoption("--fast")


def _is_fast(item: pytest.Item) -> bool:
    needs_a_database = "postgres_database" in getattr(item, "fixturenames", ())
    slow = item.get_closest_marker("slow") is not None or needs_a_database
    return not slow and not item.path.relative_to(ROOM).as_posix().startswith(NOT_FAST)


def _uses_the_sdk(item: pytest.Item) -> bool:
    return not USES_THE_SDK.isdisjoint(item.path.relative_to(ROOM).parts)
