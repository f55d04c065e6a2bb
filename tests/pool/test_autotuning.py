"""Results of XLA's autotuning survive a lost cache and reach other hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache, compiler

from tinkerflow.backend.pool.autotuning import FOLDER, AutotuningResults, keep_results
from tinkerflow.backend.spec.commands import GroupConfig
from tinkerflow.backend.store import parts
from tinkerflow.backend.store.blobs import Blobs, open_blobs

H100 = "NVIDIA H100; cuda 13; XLA_FLAGS="


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return open_blobs(f"file://{tmp_path / 'store'}")


def tuned(cache: Path, name: str, content: str) -> None:
    """Write a result as XLA does."""
    (cache / FOLDER).mkdir(parents=True, exist_ok=True)
    (cache / FOLDER / f"{name}.textproto").write_text(content)


def found(cache: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (cache / FOLDER).iterdir() if path.is_file()}


def test_group_without_a_cache_gets_the_results_of_the_previous_group(tmp_path: Path, blobs: Blobs) -> None:
    before = AutotuningResults(tmp_path / "before", blobs, H100)
    assert before.fetch() == 0
    tuned(tmp_path / "before", "product", "algorithm 7")
    assert (before.publish(), before.publish()) == (1, 0)
    after = AutotuningResults(tmp_path / "after", blobs, H100)
    assert (after.fetch(), after.publish()) == (1, 0)
    assert found(tmp_path / "after") == {"product.textproto": "algorithm 7"}


def test_the_first_stored_result_stays(tmp_path: Path, blobs: Blobs) -> None:
    first, second = (AutotuningResults(tmp_path / name, blobs, H100) for name in ("first", "second"))
    assert first.fetch() == second.fetch() == 0
    tuned(tmp_path / "first", "product", "algorithm 7")
    tuned(tmp_path / "second", "product", "algorithm 9")
    first.publish()
    second.publish()
    third = AutotuningResults(tmp_path / "third", blobs, H100)
    third.fetch()
    assert found(tmp_path / "third") == {"product.textproto": "algorithm 7"}


def test_autotuning_results_are_separate_by_device_compiler_and_flags(tmp_path: Path, blobs: Blobs) -> None:
    of_h100 = AutotuningResults(tmp_path / "h100", blobs, H100)
    tuned(tmp_path / "h100", "product", "algorithm 7")
    of_h100.publish()
    for other in ("NVIDIA H200; cuda 13; XLA_FLAGS=", "NVIDIA H100; cuda 12; XLA_FLAGS=", f"{H100}--xla_x=true"):
        assert AutotuningResults(tmp_path / "other", blobs, other).fetch() == 0


def test_unfinished_files_are_not_stored(tmp_path: Path, blobs: Blobs) -> None:
    results = AutotuningResults(tmp_path / "cache", blobs, H100)
    tuned(tmp_path / "cache", "product", "algorithm 7")
    (tmp_path / "cache" / FOLDER / "tmp").mkdir()
    (tmp_path / "cache" / FOLDER / "fetched-abc").write_text("half")
    assert results.publish() == 1


def test_a_failed_fetch_leaves_no_file(tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = AutotuningResults(tmp_path / "before", blobs, H100)
    tuned(tmp_path / "before", "product", "algorithm 7")
    before.publish()

    def fail(path: Path, data: object) -> object:
        raise OSError("the store or the disk fails")

    for broken, method in ((type(blobs), "read"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(broken, method, fail)
            with pytest.raises(OSError, match="fails"):
                AutotuningResults(tmp_path / "after", blobs, H100).fetch()
        assert found(tmp_path / "after") == {}


def test_a_group_fetches_results_and_publishes_its_own(
    tmp_path: Path, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[int] = []
    monkeypatch.setattr(AutotuningResults, "keep_published", lambda results: published.append(results.publish()))
    tuned(tmp_path / "before", "product", "algorithm 7")
    AutotuningResults(tmp_path / "before", blobs, H100).publish()
    tuned(tmp_path / "cache", "other product", "algorithm 2")
    config = GroupConfig("m", "bfloat16", 1, 1, 64, 0, 4, 8, str(tmp_path / "cache"))
    keep_results(config, H100)  # the configuration has no store
    assert published == [] and found(tmp_path / "cache") == {"other product.textproto": "algorithm 2"}
    in_store = replace(config, store_url=f"file://{tmp_path / 'store'}", store_mark=parts.store_mark(blobs))
    keep_results(in_store, H100)
    assert published == [1]
    assert found(tmp_path / "cache").keys() == {"product.textproto", "other product.textproto"}


def test_xla_autotuning_results_are_kept_in_the_compilation_cache(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    debug = options.executable_build_options.debug_options
    assert debug.xla_gpu_per_fusion_autotune_cache_dir == str(tmp_path / FOLDER)
