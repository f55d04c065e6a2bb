"""The distance between the sampling policy and the trained policy, in each forward_backward: DRIFT_FIGURES.

If a trainer and a sampler compute the same text differently, or samples are older than the weights, every policy
gradient is biased, and no other metric shows it. Each figure is a metric of results, a column of training steps, a
curve of the console, a value in trackers, a Prometheus series, and, if it has a limit, an alarm with its event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.spec.outliers import UsualRange

Floats = npt.NDArray[np.floating]

KL_MEAN, KL_MAX = "kl_sample_train:mean", "kl_sample_train:max"  # the SDK merges metrics by these endings
AGREEMENT = "routing_agreement:mean"  # the share of equal sets of experts
FIRST_AGREEMENT = "first_routing_agreement:mean"  # in the first layer with given experts
SUPPORTED = "support_replay:mean"  # the share of tokens with a support, in data with supports (`spec.supports`)
WORST = 5  # tokens of a report
_TINY = 1e-30  # the smallest value whose logarithm is compared
_MOST = 20.0  # the largest difference of logprobs that is counted; its exp is 5e8


@dataclass(frozen=True)
class DriftLimits:
    """The values of DRIFT_FIGURES beyond which an alarm is raised, by column; 0 = no alarm."""

    kl: float = 0.0
    agreement: float = 0.0

    @property
    def first_agreement(self) -> float:
        """The limit for all layers."""
        return self.agreement


UNLIMITED = DriftLimits()


@dataclass(frozen=True)
class DriftFigure:
    """A figure that compares the sampler with the trainer.

    column: the training step's column, where the figure is summed over tokens. metric: its name in results. title: its
    curve's title. falls: whether smaller values are worse. unit: in words. event: its alarm's event, "" = it has no
    limit. cause: a sentence for its alarm. least_rise: a distance of at least this also raises an alarm if it is far
    above the usual range of its run; 0 = only the limit counts. routed_rise: the same for steps whose routing is
    measured.
    """

    column: str
    metric: str
    title: str
    falls: bool
    unit: str
    event: str = ""
    cause: str = ""
    least_rise: float = 0.0
    routed_rise: float = 0.0

    @property
    def name(self) -> str:
        """Its name in trackers and in Prometheus."""
        return self.metric.partition(":")[0]

    @property
    def meaning(self) -> str:
        """The sentence that describes its Prometheus series."""
        worst = "smallest" if self.falls else "largest"
        return f"The {worst} {self.metric} of the newest steps of live models, {self.unit}."

    def limit(self, limits: DriftLimits) -> float:
        """The limit of this figure, 0 = none."""
        return float(getattr(limits, self.column)) if self.event else 0.0

    def distance(self, value: float) -> float:
        """How far a value is from the best value, which is 1 for a figure that falls, else 0. It is its own inverse."""
        return 1 - value if self.falls else value

    def is_wrong(self, value: float | None, limits: DriftLimits) -> bool:
        """Whether a value is beyond the limit. None: it was not measured."""
        limit = self.limit(limits)
        return value is not None and limit > 0 and (value < limit if self.falls else value > limit)

    def alarm(self, value: float, limits: DriftLimits) -> str:
        side = "below" if self.falls else "above"
        return f"{self.name} is {value:.3g}, {side} {self.limit(limits):g}: {self.cause}"


class UsualDrift:
    """The usual range of a DriftFigure in a run, which reveals faults far below the limit.

    A float8 KV cache or a slightly different adapter moves `kl_sample_train` from 5e-5 to 1e-3 nats. In a mixture of
    experts, the divergence of a clean step is sometimes ten times the usual one, because a token of the prompt goes to
    other experts. There the agreement of routers reveals these faults: it falls from 97 % to at most 87 %. It is
    steadiest in the first layer with experts, because no router precedes it: a float8 KV cache lowers it from 98 % to
    91 %.
    """

    def __init__(self, figure: DriftFigure) -> None:
        self._figure, self._logs = figure, UsualRange()

    def alarm(self, value: float, limits: DriftLimits, *, routed: bool) -> str:
        """Count a value. Returns the text of an alarm if it is far worse than the earlier values, else "".

        routed: whether the step's routing is measured.
        """
        figure, line = self._figure, ""
        least, distance = figure.routed_rise if routed else figure.least_rise, figure.distance(value)
        log = math.log(max(distance, _TINY))
        if 0 < least <= distance and figure.limit(limits) > 0 and self._logs.exceeded_by(log):
            before = f"and the median of the steps before is {figure.distance(math.exp(self._logs.median)):.2g}"
            line = f"{figure.name} is {value:.3g}, {before}: {figure.cause}"
        self._logs.add(log)
        return line


DRIFT_FIGURES = (
    DriftFigure(
        column="kl",
        metric=KL_MEAN,
        title="KL(sampler, trainer)",
        falls=False,
        unit="in nats",
        event="tinkerflow.run.drift",
        cause="the samples are of older weights or computed differently",
        least_rise=3e-4,  # smaller values are rounding of float32 and bfloat16
        routed_rise=0.02,  # clean steps of a tiny mixture reach 0.004
    ),
    DriftFigure(
        column="agreement",
        metric=AGREEMENT,
        title="Routing agreement",
        falls=True,
        unit="a share of sets of experts",
        event="tinkerflow.run.routing",
        cause="the trainer's routers choose different experts than the sampler's did",
        routed_rise=0.12,  # clean steps reach 0.09
    ),
    DriftFigure(
        column="first_agreement",
        metric=FIRST_AGREEMENT,
        title="Routing agreement, first layer",
        falls=True,
        unit="a share of sets of experts in the first layer that has some",
        event="tinkerflow.run.routing",
        cause="the trainer's first layer chooses different experts than the sampler's did",
        routed_rise=0.05,
    ),
    DriftFigure(  # tokens without a support may have been drawn without filters, so it has no limit
        column="supported",
        metric=SUPPORTED,
        title="Support replay",
        falls=True,
        unit="a share of tokens",
    ),
)


def drift_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """The values of DRIFT_FIGURES in the metrics of a result, by column. Figures that were not measured are absent."""
    return {figure.column: metrics[figure.metric] for figure in DRIFT_FIGURES if figure.metric in metrics}


DriftTokens = tuple[Floats, Floats, npt.NDArray[np.bool_]]


def worst_tokens(tokens: Iterable[DriftTokens]) -> list[str]:
    """The WORST tokens with the largest differences of logprobs, as phrases. tokens: see `kl_sample_train`."""
    found = []
    for datum, (sampled, trained, counted) in enumerate(tokens):
        apart = np.where(counted, np.abs(trained.astype(np.float64) - sampled), 0.0)
        for place in np.argsort(-apart, axis=None)[:WORST]:
            at = np.unravel_index(place, apart.shape)
            if apart[at] > 0:
                text = f"datum {datum}, token {at[0]}: sampled at {sampled[at]:.3g}, trained at {trained[at]:.3g}"
                found.append((-float(apart[at]), text))
    return [text for _, text in sorted(found)[:WORST]]


def kl_sample_train(tokens: Iterable[DriftTokens]) -> dict[str, float]:
    """The mean and the largest KL(sampler || trainer) of a token, in nats, from logprobs of the drawn tokens.

    tokens: three arrays of equal shape for each example: the sampler's logprobs, the trainer's logprobs, and which
    tokens count. The estimator is Schulman's k3, exp(d) - 1 - d with d = trained - sampled. It is never negative, and
    unbiased if the tokens were drawn at temperature 1 without filters (http://joschu.net/blog/kl-approx.html). It is
    about d**2 / 2 for small d. Both metrics are 0 if no token counts, because the SDK would drop a metric that a part
    of a request lacks.
    """
    moved = [(trained.astype(np.float64) - sampled)[counted] for sampled, trained, counted in tokens]
    d = np.minimum(np.concatenate(moved), _MOST) if moved else np.empty(0)
    if not d.size:
        return {KL_MEAN: 0.0, KL_MAX: 0.0}
    each = np.expm1(d) - d
    return {KL_MEAN: float(each.mean()), KL_MAX: float(each.max())}
