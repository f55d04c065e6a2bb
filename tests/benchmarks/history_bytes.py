"""The size of a run's history in the store: supervised data in three epochs, each in a different order.

    python -m tests.benchmarks.history_bytes

The tokens are the words of this repository's documentation and code, numbered in order of first use: a vocabulary of
about 50,000. Prints bytes per token as sent and as stored, bytes per datum, and CPU time per step.
"""

from __future__ import annotations

import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.spec.history import PastRequest, digest
from tinkerflow.backend.store import Store
from tinkerflow.backend.wire import split_data
from tinkerflow.backend.wire import tinker_pb2 as pb

ROOT = Path(__file__).parents[2]
RUN, STEPS, ROWS, TOKENS = "sess-0123456789abcdef:train:0", 16, 16, 512


def words() -> npt.NDArray[np.int32]:
    files = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("backend/**/*.py"))]
    numbers: dict[str, int] = {}
    text = " ".join(file.read_text() for file in files)
    return np.array([numbers.setdefault(word, len(numbers)) for word in text.split(" ")], np.int32)


def request(seq_id: int, rows: list[npt.NDArray[np.int32]]) -> PastRequest:
    message = pb.ForwardBackwardRequest(model_id=RUN, seq_id=seq_id, loss_fn="cross_entropy")
    for tokens in rows:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].tobytes()
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        targets.dense, targets.dtype = tokens[1:].astype(np.int64).tobytes(), pb.DTYPE_INT64
        weights.dense, weights.dtype = np.ones(TOKENS, np.float32).tobytes(), pb.DTYPE_FLOAT32
    body = message.SerializeToString()
    return PastRequest(seq_id, "forward_backward", "req-0123456789abcdef", body, None, digest(body), datetime.now(UTC))


def main() -> None:
    ids, draw = words(), np.random.default_rng(0)
    rows = [ids[start : start + TOKENS + 1] for start in draw.integers(0, len(ids) - TOKENS - 1, STEPS * ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        histories = Store.open(f"file://{folder}").histories
        for epoch in range(3):
            order = draw.permutation(len(rows)).reshape(STEPS, ROWS)
            requests = [
                request(1 + epoch * STEPS + step, [rows[n] for n in chosen]) for step, chosen in enumerate(order)
            ]
            began = time.process_time()
            size = histories.write_segment(RUN, requests, lambda past: split_data(past.payload)).size_bytes
            spent = 1e3 * (time.process_time() - began) / STEPS
            sent, tokens = sum(len(past.payload) for past in requests), STEPS * ROWS * TOKENS
            figures = (
                f"{sent / tokens:.2f} bytes a token sent, {size / tokens:.2f} stored, {size / len(rows):.0f} a datum"
            )
            print(f"epoch {epoch + 1}: {figures}; {spent:.2f} CPU-ms a step of {ROWS} x {TOKENS}")


if __name__ == "__main__":
    main()
