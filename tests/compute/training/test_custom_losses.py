"""Traced losses against torch: value, metrics and slope of graphs made by the SDK's own tracer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F
from tests.compute.closeness import close
from tests.compute.conftest import add_adapter, examples, forward, gradients
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from tinkerflow.backend.compute.training.custom_loss import custom_loss
from tinkerflow.backend.compute.training.custom_loss.ops import DTYPES, OPS
from tinkerflow.backend.compute.training.sequence_losses import SequenceLosses
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec import torch_names
from tinkerflow.backend.spec.commands import CustomLoss, Example, Forward
from tinkerflow.backend.spec.traced_work import examples_of_step, loss_seconds, loss_steps
from tinkerflow.backend.wire import read_custom_loss

Fn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def trace(fn: Fn, **ranks: int) -> CustomLoss:
    """The loss that the server stores for a function that the SDK traced."""
    handle = trace_loss(fn, ranks, "sess-1")
    body = {
        "session_id": "sess-1",
        "custom_loss_seq_id": 0,
        "name": handle.name,
        "inputs": [one.model_dump() for one in handle.inputs],
        "graph": encode_graph(handle).model_dump(),
    }
    return read_custom_loss(orjson.loads(orjson.dumps(body)))


def ppo(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    outside = ((ratio < 0.8) | (ratio > 1.2)).float()
    return loss, {"custom/clipped:mean": outside.mean(), "custom/kl:sum": (old - logprobs).detach().sum()}


def gspo(logprobs, old, advantages):
    ratio = torch.exp((logprobs - old).mean())
    return -(torch.clamp(ratio, max=1.5) * advantages).mean() * logprobs.shape[0], {"custom/ratio:mean": ratio}


def masked(logprobs, old, advantages):
    mask = advantages > 0
    kept = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    loss = -kept.sum() / mask.float().sum().clamp(min=1) + 0.1 * logprobs.masked_fill(~mask, 0.0).square().mean()
    return loss, {"custom/n:sum": mask.sum()}


def reductions(logprobs, old, advantages):
    top, places = torch.max(logprobs, dim=0)
    loss = logprobs.std() + logprobs.var(unbiased=False) + torch.logsumexp(logprobs, 0) + top + logprobs.amin()
    loss = loss + (logprobs.softmax(0) * old).sum() + torch.log_softmax(logprobs, dim=0)[-1] + logprobs.cumsum(0).mean()
    return loss + math.sqrt(logprobs.size(0)) * logprobs.max(), {"custom/place:sum": places}


def shapes(logprobs, old, advantages):
    both = torch.stack([logprobs, old], dim=1)
    loss = (both.transpose(0, 1) @ both).reshape(-1)[1:3].sum() + torch.cat([logprobs, old]).view(2, -1).prod(0).sum()
    loss = loss + (logprobs.unsqueeze(1) * advantages[None, :]).mean() + logprobs[:-1].dot(old[1:])
    index = torch.arange(logprobs.shape[0]).flip(0)
    return loss + (logprobs.gather(0, index) * advantages).sum() / logprobs.numel(), {}


def elementwise(logprobs, old, advantages):
    x = logprobs
    y = F.logsigmoid(x) + F.softplus(x) + F.relu(x + 3) + torch.sigmoid(x) + F.silu(x) + F.gelu(x) + torch.tanh(x)
    y = y + abs(x) ** 1.5 + torch.log1p(x.exp()) - torch.expm1(x) + x.neg().sqrt() + torch.erf(x) + 2 / (x - 1)
    y = y + torch.nan_to_num(x) + torch.lerp(x, old, 0.3) + torch.maximum(x, old) - torch.logaddexp(x, old)
    loss = y.sum() + F.mse_loss(x, old) + F.huber_loss(x, old, delta=0.5) + F.smooth_l1_loss(x, old, reduction="sum")
    return loss, {"custom/y:mean": y.to(torch.float32).mean()}


def corners(logprobs, old, advantages):
    same, zero = logprobs - logprobs.detach(), torch.zeros_like(old)
    loss = same.abs().sum() + abs(same).sum() + F.l1_loss(same, zero, reduction="sum") + F.softplus(same, 1, 0).sum()
    loss = loss + F.smooth_l1_loss(same, zero, beta=0.0) + F.smooth_l1_loss(logprobs, old, beta=0.0)
    loss = loss + torch.pow(same, zero).sum() + (same**zero).sum() + torch.xlogy(same, -old.abs()).sum()
    return loss + logprobs[:1].std(unbiased=False), {}


def forms(logprobs, old, advantages):
    """Empty lists of dimensions, a dtype of a sum, and sums of booleans."""
    x, positive = logprobs * advantages, torch.add(old > 0, advantages > 0)
    loss = x.sum(dim=()) + x.mean(()) + x.amax(dim=[]) + x.amin(()) + x.detach().var(dim=())
    loss = loss + (old.to(torch.float16).softmax(0, dtype=torch.float32) * logprobs).sum() + (positive * logprobs).sum()
    counts = torch.count_nonzero(old, dim=()), (old > 0).any(dim=()).sum()
    return loss + x.detach().std((), False, True).sum(), {f"custom/{i}:sum": count for i, count in enumerate(counts)}


def options(logprobs, old, advantages):
    """Weights of distances, the implicit dimension of a softmax, and named bounds of a range."""
    x, both = logprobs, torch.stack([logprobs, old], dim=1)
    loss = F.mse_loss(x, old, weight=advantages.abs()) + F.huber_loss(x, old, weight=advantages)
    loss = loss + F.mse_loss(x, old, reduction="sum", weight=advantages)
    loss = loss + (F.softmax(both) * advantages[:, None]).sum() + F.log_softmax(both)[:, 0].sum() + F.softmax(x)[0]
    every = torch.arange(start=0, end=old.size(0), step=2), torch.arange(1, old.size(0), step=2)
    return loss + x[every[0]].sum() - 2 * x[every[1]].sum(), {}


def indices(logprobs, old, advantages):
    both, index = torch.stack([logprobs, old], dim=1), torch.arange(old.size(0))[:3]
    picked = both[None][0, :, index % 2] * advantages[:, None]
    turned = both.permute(dims=(1, 0)).flip(dims=(1,))[None].squeeze((0, 1)) * advantages
    picked = picked.sum() + turned.sum() + (both.narrow(0, -2, 2) * advantages[:2, None]).sum()
    return picked + both.gather(0, index[:, None]).sum() + both.square().gather(1, index[None] % 2).sum(), {}


LENGTHS = (1, 5, 12)


def data(lengths=LENGTHS, columns: int | None = None) -> tuple[Example, ...]:
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        shape = (length,) if columns is None else (length, columns)
        inputs = {name: rng.normal(size=shape).astype(np.float32) for name in ("old", "advantages")}
        targets = np.zeros((length, columns or 1), np.int32)
        made.append(
            Example(targets[:, 0], targets, np.ones_like(targets, np.float32), flat=columns is None, inputs=inputs)
        )
    return tuple(made)


def in_torch(fn: Fn, examples: tuple[Example, ...], logprobs: list[np.ndarray]) -> Any:
    losses, slopes, metrics = [], [], dict[str, float]()
    for example, lp in zip(examples, logprobs, strict=True):
        x = torch.tensor(lp[:, 0] if example.flat else lp, requires_grad=True)
        loss, found = fn(x, *(torch.tensor(value) for value in example.inputs.values()))
        loss.backward()
        losses.append(loss.item())
        slopes.append(x.grad.numpy().reshape(lp.shape))
        for key, value in found.items():
            metrics[key] = metrics.get(key, 0.0) + value.item()
    return losses, slopes, {k: v / len(examples) if k.endswith("mean") else v for k, v in metrics.items()}


def compute(loss: CustomLoss, examples: tuple[Example, ...], logprobs: list[np.ndarray]) -> Any:
    """The loss and the slope of each example, and the metrics of all, as workers compute them."""
    command = Forward("a", examples, "custom", custom=loss, loss_seconds=loss_seconds(loss, examples))
    losses, done = SequenceLosses(command, logprobs), list[int]()
    for step in range(loss_steps(command)):
        losses.compute(members := examples_of_step(command, step))
        done += members
    assert done == list(range(len(examples)))
    outcomes = [custom_loss(loss, example, lp) for example, lp in zip(examples, logprobs, strict=True)]
    return [outcome[:2] for outcome in outcomes], losses.result().metrics


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for")
@pytest.mark.parametrize(
    "fn",
    [ppo, gspo, masked, reductions, shapes, elementwise, corners, indices, forms, options],
    ids=lambda fn: fn.__name__,
)
def test_custom_loss_equals_torch_in_value_slope_and_metrics(fn):
    examples = data(
        LENGTHS[1:] if fn in (reductions, shapes, indices, forms, options) else LENGTHS
    )  # the std of one value is NaN
    rng = np.random.default_rng(1)
    logprobs = [-rng.exponential(1.5, e.targets_TK.shape).astype(np.float32) for e in examples]
    expected_losses, expected_slopes, expected_metrics = in_torch(fn, examples, logprobs)
    found, metrics = compute(trace(fn, logprobs=1, old=1, advantages=1), examples, logprobs)
    assert [loss for loss, _ in found] == pytest.approx(expected_losses, rel=2e-5, abs=1e-6)
    for (_, slope), expected in zip(found, expected_slopes, strict=True):
        close(slope, expected, ulps=512)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)


def test_two_dimensional_targets_and_scalars():
    def mixture(logprobs, old, scale):
        return -(scale * old * logprobs).sum(dim=-1).mean(), {}

    examples = data(columns=3)
    scale = np.float32(2).reshape(())
    scaled = tuple(replace(e, inputs={"old": e.inputs["old"], "scale": scale}) for e in examples)
    logprobs = [-np.ones(e.targets_TK.shape, np.float32) for e in scaled]
    losses, slopes, _ = in_torch(mixture, scaled, logprobs)
    found, _ = compute(trace(mixture, logprobs=2, old=2, scale=0), scaled, logprobs)
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5)
    for (_, a), b in zip(found, slopes, strict=True):
        close(a, b)


def test_every_name_that_may_be_called_has_an_op():
    assert {*torch_names.FUNCTIONS.values(), *torch_names.METHODS.values()} == OPS.keys()
    assert DTYPES.keys() == torch_names.DTYPES


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda logprobs, old, advantages: (logprobs * 2, {}), r"the loss has shape \[5\]: must be a scalar"),
        (lambda logprobs, old, advantages: (logprobs.reshape(7).sum(), {}), r"node 'reshape' \(reshape\)"),
        (
            lambda logprobs, old, advantages: (logprobs.sum() * (old.size(0) * 10**10), {}),
            "the result is beyond 32 bits",
        ),
        (lambda logprobs, old, advantages: (logprobs.sum() * 2 ** (old.size(0) ** 9), {}), "OverflowError|beyond"),
        (lambda logprobs, old, advantages: (torch.arange(old.size(0) * 10**6).sum() * logprobs.sum(), {}), "is longer"),
        (lambda logprobs, old, advantages: (logprobs.expand(10**8, 5).sum(), {}), "500000000 cells: must be at most"),
        (lambda logprobs, old, advantages: (logprobs.diff(n=65).sum(), {}), "n is 65: must be 0 to 64"),
        (lambda logprobs, old, advantages: (logprobs[(None,) * 8].sum(), {}), "9 dimensions: must be at most 8"),
        (
            lambda logprobs, old, advantages: (F.mse_loss(logprobs, old, reduce=False).sum(), {}),
            "size_average and reduce are not supported",
        ),
        (
            lambda logprobs, old, advantages: (F.mse_loss(logprobs, old, weight=advantages[:1]), {}),
            r"weight of shape \[1\] for a tensor of shape \[5\]",
        ),
    ],
)
def test_uncomputable_loss_is_refused_before_computing(fn, error):
    with pytest.raises(UserError, match=error):
        loss_seconds(trace(fn, logprobs=1, old=1, advantages=1), data((5,)))


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda logprobs, old: (logprobs[old > 0].sum(), {}), r"node 'getitem' \(operator.getitem\)"),
        (
            lambda logprobs, old: ((logprobs * old.view(torch.int32)).sum(), {}),
            "view as a dtype reads the bits",
        ),
    ],
)
def test_a_node_that_depends_on_values_is_named_when_it_is_computed(fn, error):
    loss = trace(fn, logprobs=1, old=1)
    with pytest.raises(UserError, match=error):
        custom_loss(loss, data((5,))[0], -np.ones((5, 1), np.float32))


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, places: x[places + 2],
        lambda x, places: x.index_select(0, places - 1),
        lambda x, places: x.gather(0, places - 1),
    ],
    ids=["beyond", "index_select before", "gather before"],
)
def test_an_index_tensor_that_points_outside_makes_the_loss_nan(pick):
    def outside(logprobs, old, advantages):
        return pick(logprobs, torch.arange(old.size(0))).sum(), {}

    loss = trace(outside, logprobs=1, old=1, advantages=1)
    value, *_ = custom_loss(loss, data((5,))[0], -np.ones((5, 1), np.float32))
    assert math.isnan(value)


def test_server_trains_with_a_custom_loss_like_the_client(executor):
    """The SDK trains with a local callable in three steps: forward, the loss's slope, and weighted cross entropy."""
    add_adapter(executor, "custom")
    add_adapter(executor, "client")
    given = examples((9, 30, 4))
    mine = tuple(
        replace(e, inputs={"old": e.inputs["logprobs"][:, 0], "advantages": e.inputs["advantages"][:, 0]})
        for e in given
    )
    command = Forward("custom", mine, "custom", custom=trace(ppo, logprobs=1, old=1, advantages=1))
    result = executor.execute(command)
    logprobs = [lp[:, None] for lp in forward(executor, "client", given).logprobs]
    losses, slopes, metrics = in_torch(ppo, mine, logprobs)
    surrogate = tuple(Example(e.tokens_T, e.targets_TK, -slope) for e, slope in zip(given, slopes, strict=True))
    forward(executor, "client", surrogate, backward=True)
    assert result.loss_sum == pytest.approx(sum(losses), rel=1e-4)
    assert result.metrics == pytest.approx(metrics, rel=1e-4)
    ours, theirs = gradients(executor, "custom"), gradients(executor, "client")
    scale = max(np.abs(g).max() for g in theirs.values())
    assert max(np.abs(ours[n] - theirs[n]).max() for n in theirs) < 1e-4 * scale


def test_nan_slope_changes_nothing(executor):
    add_adapter(executor, "nan")
    loss = trace(lambda logprobs: (torch.sqrt(logprobs).sum(), {}), logprobs=1)
    plain = tuple(Example(e.tokens_T, e.targets_TK, e.weights_TK) for e in examples((5, 9)))
    with pytest.raises(UserError, match=r"data\[0\]: custom gives the loss nan"):
        executor.execute(Forward("nan", plain, "custom", custom=loss))
    assert gradients(executor, "nan") == {}
