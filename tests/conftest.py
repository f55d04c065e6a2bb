"""Options, hooks and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
gc.set_threshold(50_000, 20, 50)  # set here, because pytest's collection spent a sixth of its time on garbage
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["DO_NOT_TRACK"] = "1"  # as our commands set it for Prefect
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as in our commands
os.environ["TINKERFLOW_WARM_UP"] = "false"  # tests compile only what they need; test_warming.py tests the warm-up
# Prefect's logging set-up closes the stream of absl's handler, which would otherwise be pytest's captured stream.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
USES_THE_SDK = {"api", "cassettes", "compat", "e2e"}
# Folders and files that `--fast` leaves out, because they start services, worker groups or databases, or compile a lot.
NOT_FAST = (
    *("accelerators", "benchmarks", "compat", "e2e", "flows", "pool", "compute/sampler"),
    *(f"compute/test_{name}.py" for name in ("executor", "experts", "mesh", "parity", "platforms")),
    *(f"compute/test_{name}.py" for name in ("quantized", "registry", "warming")),
    *(f"compute/training/test_{name}.py" for name in ("custom_losses", "masked_tokens", "train", "train_work")),
    *(f"api/test_{name}.py" for name in ("fuzz", "limits", "sdk", "serve", "tenants", "traps")),
    *(f"deployments/test_{name}.py" for name in ("keeper", "tiny_model", "up")),
    *(f"deployments/cassettes/test_{name}.py" for name in ("programs", "replay")),
)
# Tests of bits, of compiled programs, of many steps and of the README's commands compile programs as users run them.
# Other tests compile without most optimizations, in a third of the time.
AS_USERS_RUN_IT = (
    "accelerators",
    "benchmarks",
    *(f"compute/sampler/test_{name}.py" for name in ("bits", "drift_alarms")),
    *(f"compute/training/test_{name}.py" for name in ("bits", "train_work")),
    *(f"e2e/test_{name}.py" for name in ("crash_loop", "quickstart", "readme", "wheel")),
)
# Files whose tests share a service or a Prefect server. One process runs all files of a line, and starts it once.
_CLIENTS = ("chat", "console", "constraints", "cookbook", "history", "images", "losses", "optimizers", "sampling")
_CLIENTS += ("sft", "streams", "tenants", "weights")
_PIPELINES = ("learning", "nightly", "prefect_page", "served")
SHARE_A_SERVICE = (
    tuple(f"tests/e2e/test_{name}.py" for name in _CLIENTS),
    tuple(f"tests/e2e/test_{name}.py" for name in _PIPELINES),
    ("tests/compat/",),
    ("tests/e2e/test_environments.py", "tests/e2e/test_rewards.py"),
    ("tests/flows/test_prefect.py", "tests/flows/test_prefect_access.py"),
)
_LONG = tuple(f"tests/e2e/test_{name}.py" for name in ("tutorials", "crash_loop", "quickstart"))
LONGEST = (*_LONG, *SHARE_A_SERVICE[0], *SHARE_A_SERVICE[1])  # the first files that use the SDK
# Rooms whose tests must leave the process unchanged; the others have not been run with this check yet.
GUARDED = ("core", "deployments", "supervise", "tasks", "tracking")
_QUICK_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
CROWDED = 0.3  # share of a process's memory maps; above this share, compiled programs are dropped after a file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what starts services or compiles much")
    parser.addoption("--thorough", action="store_true", help="run the tests that are marked as thorough, too")
    parser.addoption("--families", action="store_true", help="run the parity tests for every model family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop slow tests with `--fast` and thorough tests without `--thorough`; run tests that use the SDK last.

    An open socket is no error in these: the SDK leaves daemon threads running, and closes some connections only when
    they are garbage-collected, which may be during any later test.
    """
    kept, dropped = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (kept if _is_chosen(item, config) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = sorted(
        kept, key=lambda item: (_uses_the_sdk(item), [not item.nodeid.startswith(one) for one in LONGEST])
    )
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

    config.option.loadscopereorder = False  # tests that use the SDK stay last
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude objects that exist before the first test from garbage collection, which saves a tenth of the time."""
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
    """Set XLA's options for quick compilation, also in the processes that tests start. Each program is compiled once.

    XLA compiles without its fusion emitters, which would take a third of the remaining time, and compiles each program
    in one piece. JAX has no options for these. In started processes, torch is hidden: the SDK would import it for
    seconds.
    """
    import jax
    from jax._src import compiler
    from jax.experimental.compilation_cache import compilation_cache

    from tinkerflow.backend.compute.platforms import known_flags

    jax.config.update("jax_compilation_cache_dir", str(compiled_programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # JAX decides at its first program whether it uses the folder
    flags = [f"--{name}={str(value).lower()}" for name, value in _QUICK_OPTIONS.items()]
    known = known_flags(flags, ("jaxlib/libjax_common.so",))  # XLA of JAX 0.11 lacks one of these options
    compiler.get_compile_options(1, 1)  # reads XLA_FLAGS once: the flags below are for processes that tests start
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (WITHOUT_TORCH, os.environ.get("PYTHONPATH")))))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        patch.setenv("XLA_FLAGS", " ".join([XLA_FLAGS, *compress(flags, known)]))
        yield list(compress(_QUICK_OPTIONS.items(), known))


@pytest.fixture(autouse=True, scope="module")
def compiler(request: pytest.FixtureRequest, quick_options: list[tuple[str, Any]]) -> Iterator[None]:
    """Set how much JAX optimizes in a file's tests, in this process and in those that the tests start."""
    import jax
    from jax._src import compiler

    path = request.path.relative_to(ROOM).as_posix()
    quickly = not path.startswith(AS_USERS_RUN_IT)
    quickly &= "xla_cpu_max_isa" not in XLA_FLAGS  # .ci/run checks the results of other CPUs
    usual = compiler.get_compile_options

    def options(*args: Any, **kwargs: Any) -> Any:
        made = usual(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, *quick_options]
        return made

    if not quickly:
        forget_programs()  # earlier files may have compiled these programs quickly
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


@pytest.hookimpl(tryfirst=True)  # before plugins that import here: an error in a garbage collection ends an import
def pytest_sessionfinish() -> None:
    """Collect sockets that the SDK left open while warnings are ignored; they are errors in pytest's own collection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Record the spans of this process while the test runs."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tinkerflow.backend.core import tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


@pytest.fixture
def statements() -> Callable[[], AbstractContextManager[list[str]]]:
    """`with statements() as made:` collects the SQL statements in the block, without BEGIN."""

    import sqlalchemy as sa

    @contextmanager
    def counting() -> Iterator[list[str]]:
        made: list[str] = []

        def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            if not statement.startswith("BEGIN"):
                made.append(statement)

        sa.event.listen(sa.Engine, "before_cursor_execute", note)
        try:
            yield made
        finally:
            sa.event.remove(sa.Engine, "before_cursor_execute", note)

    return counting


@pytest.fixture(scope="session")
def compiled_programs(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of JAX's compilation cache. All tests share it, because most compile the same few programs."""
    cache = getattr(pytestconfig, "cache", None)  # none with `-p no:cacheprovider`
    return cache.mkdir("jax") if cache is not None else tmp_path_factory.mktemp("jax")


@pytest.fixture(scope="session")
def prefect_database(compiled_programs: Path) -> Callable[[Path], None]:
    """prefect_database(data_dir) copies an empty database into the data dir; a Prefect server would need 4 s for it."""
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
def journal_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite journal without rows. Tests copy it, because a migration takes a tenth of a second."""
    from tinkerflow.backend.journal import migrate

    path = tmp_path_factory.mktemp("journal") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_database() -> Iterator[Callable[[str], str]]:
    """postgres_database(name) returns the URL of a new database, on a server that runs as long as the tests."""
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
            connection.execute("ALTER SYSTEM SET fsync = off")  # otherwise the stop syncs for half a minute
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
