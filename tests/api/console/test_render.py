"""Numbers, sizes, paths and times as text."""

from __future__ import annotations

from datetime import timedelta

from tinkerflow.api.console.render import number, path_parts, seconds, size, when
from tinkerflow.backend.core.clock import SystemClock


def test_numbers_and_sizes() -> None:
    assert [number(n) for n in (None, 0, 1234567, 0.12345, 1e-4, 3.0, 12.3456, 1234.56, 1.5e9)] == [
        "\N{EN DASH}", "0", "1,234,567", "0.1235", "0.0001", "3", "12.35", "1,235", "1,500,000,000",
    ]  # fmt: skip
    assert [size(n) for n in (0, 999, 1500, 2.5e9, 7e15)] == ["0 B", "999 B", "1.5 kB", "2.5 GB", "7e+03 TB"]


def test_paths_are_quoted_as_the_sdk_quotes_them() -> None:
    assert path_parts("tinker://sess-1:train:0/weights/a") == "sess-1%3Atrain%3A0/weights%2Fa"


def test_times() -> None:
    spans = (0.25, 4, 90, 7200, 3 * 86400)
    assert [seconds(span) for span in spans] == ["250 ms", "4 s", "2 min", "2 h", "3 d"]
    now = SystemClock().now()
    assert ">2 h ago<" in when(now - timedelta(hours=2, seconds=1))
    assert ">in 2 h<" in when(now + timedelta(hours=2, seconds=1))
    assert when(None) == "\N{EN DASH}"
