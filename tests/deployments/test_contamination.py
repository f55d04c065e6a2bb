"""Search for rows of a file in training data, whole or by their n-grams."""

from __future__ import annotations

import base64
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.deployments import contamination
from tinkerflow.deployments.contamination import Comparison, TrainedRow, hashes, trained_rows

DRAW = Random(4)


def tokens(count: int) -> list[int]:
    return [DRAW.randrange(1000) for _ in range(count)]


def compared(rows: list[list[int]], trained: list[list[int]]) -> Comparison:
    comparison = Comparison([np.array(row, np.int32) for row in rows])
    for number, row in enumerate(trained):
        comparison.add(TrainedRow("run", 1 + number // 4, number % 4), np.array(row, np.int32))
    return comparison


def test_equal_rows_and_shared_parts_are_located() -> None:
    whole, half, other, short = tokens(40), tokens(40), tokens(40), tokens(5)
    found = compared(
        [whole, half, other, short, short[:4]],
        [tokens(60), [*tokens(7), *half[10:30], *tokens(3)], whole, half[25:39], short, [*half[:12], 1, *half[13:25]]],
    ).overlaps
    assert (found[0].exact, found[0].share, found[0].contaminated) == (TrainedRow("run", 1, 2), 1.0, True)
    assert found[1].exact is None and found[1].nearest == TrainedRow("run", 1, 1) and not found[1].contaminated
    assert found[1].share == (39 - 10) / 40, "tokens 10 to 38; twelve in a row do not count"
    assert (found[2].share, found[2].nearest) == (0.0, None)
    assert found[3].exact == TrainedRow("run", 2, 0) and found[4].exact is None
    assert str(found[3].exact) == "2:0 of run"


def test_most_of_a_row_makes_it_useless_and_a_template_does_not() -> None:
    template, answers = tokens(30), [tokens(10) for _ in range(8)]
    rows = [[*template, *answer] for answer in answers]
    found = compared(rows, [[*template, *tokens(10)], [*tokens(2), *rows[3][:39]]]).overlaps
    assert [overlap.share >= 0.5 for overlap in found] == [False, False, False, True, False, False, False, False]
    nearly = compared([answers[0] * 4], [answers[0] * 3]).overlaps[0]
    assert nearly.contaminated and nearly.exact is None


def test_hashes_distinguish_sequences() -> None:
    values = hashes(np.array([1, 2, 3, 1, 2, 3, 1, 3, 2], np.int32), 3).tolist()
    assert values[0] == values[3] and len(set(values)) == 5
    assert len(hashes(np.array([1, 2], np.int32), 3)) == 0
    many = hashes(np.arange(100_000, dtype=np.int32), 2)
    assert len(np.unique(many)) == len(many)


@pytest.mark.parametrize("images", [False, True])
def test_the_tokens_of_a_datum_have_the_last_target_and_a_mark_for_an_image(images: bool) -> None:
    datum = pb.Datum()
    for part in ([1, 2], [3]):
        if images and part == [3]:
            datum.model_input.add().image.data = b"png"
        datum.model_input.add().encoded_text.tokens = np.array(part, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([2, 3, 4], np.int64).tobytes(), pb.DTYPE_INT64
    assert contamination._tokens(datum).tolist() == ([1, 2, -1, 3, 4] if images else [1, 2, 3, 4])


def test_earlier_checkpoint_with_unknown_rows_is_named() -> None:
    class Server:
        """A server with only the history of run `a`, which began with a checkpoint of run `b`."""

        def ask(self, path: str, **params: Any) -> Any:
            if "/a/" not in path:
                raise NotFoundError("run 'b' has no history")
            load = base64.b64encode(b'{"path": "tinker://b/weights/x"}').decode()
            row = {
                "seq_id": 0,
                "request_id": "req-0",
                "kind": "load_weights",
                "step": None,
                "payload": load,
                "payload_hash": "",
                "result_hash": "",
                "error": None,
            }
            return {"run": {}, "requests": [row], "next": None}

    unknown: list[str] = []
    assert list(trained_rows(Server(), "a", unknown.append)) == []  # type: ignore[arg-type]
    assert unknown == ["tinker://b/weights/x"]
    with pytest.raises(NotFoundError, match="has no history"):
        list(trained_rows(Server(), "tinker://b/weights/x", unknown.append))  # type: ignore[arg-type]


def test_a_checkpoint_that_was_saved_again_has_the_rows_up_to_the_last_save() -> None:
    def request(seq_id: int, kind: str, payload: bytes, saves: str | None = None) -> dict[str, Any]:
        row = {"seq_id": seq_id, "request_id": "", "kind": kind, "step": None, "saves": saves}
        return row | {"payload": base64.b64encode(payload).decode(), "result_hash": "", "error": None}

    rows = []
    for token in range(3):
        message = pb.ForwardBackwardRequest()
        message.data.add().model_input.add().encoded_text.tokens = np.array([token], np.int32).tobytes()
        rows.append(request(2 * token, "forward_backward", message.SerializeToString()))
        name = "x" if token < 2 else "y"
        body = f'{{"path": "{name}"}}'.encode()
        rows.append(request(2 * token + 1, "save_weights", body, f"tinker://a/weights/{name}"))
    server = SimpleNamespace(ask=lambda path, **params: {"run": {}, "requests": rows, "next": None})

    def trained(path: str) -> list[list[int]]:
        return [tokens.tolist() for _, tokens in trained_rows(server, path, print)]  # type: ignore[arg-type]

    assert trained("tinker://a/weights/x") == [[0], [1]]
    assert trained("tinker://a/weights/y") == [[0], [1], [2]]
    with pytest.raises(NotFoundError, match="has no request that made it"):
        trained("tinker://a/weights/z")
