"""Conversations with environments, their rewards, and the training data made from them."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.logged import logged_by
from tests.tasks.pipelines.conftest import parse
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines import Renderer, Row
from tinkerflow.tasks.pipelines.adapters import environment_maker
from tinkerflow.tasks.pipelines.environments import (
    Asked,
    EnvironmentUnavailableError,
    Facts,
    Message,
    Reply,
    called_tools,
    checked_reward,
    facts_of,
    unrewarded,
)
from tinkerflow.tasks.pipelines.rewards import holds_answer, is_answer
from tinkerflow.tasks.pipelines.rollout_record import group_of
from tinkerflow.tasks.pipelines.rollouts import Episode, Rollouts, SampledTurn, Trajectory

ROW = parse({"prompt": "Which colour is grass?", "answer": "Green"})


class Echo:
    """A sampler that answers each prompt with the number of the sample, and records its requests."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: list[tuple[str, int, int]] = []

    def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        self.asked.append((self.tokenizer.decode(prompt.to_ints()), num_samples, params.seed))
        texts = [self.tokenizer.encode(f"{i}", add_special_tokens=False) for i in range(num_samples)]
        sequences = [
            SimpleNamespace(tokens=text, logprobs=[-1.0] * len(text), sequence_id=f"{params.seed}-{i}")
            for i, text in enumerate(texts)
        ]

        async def answer() -> Any:
            return SimpleNamespace(sequences=sequences)

        return answer()


class Saying:
    """A sampler with given answers, one per request."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts, self.asked = tokenizer, [*texts], list[str]()

    def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        self.asked.append(self.tokenizer.decode(prompt.to_ints()))
        tokens = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)

        async def answer() -> Any:
            sequence = SimpleNamespace(tokens=tokens, logprobs=[-1.0] * len(tokens), sequence_id="said")
            return SimpleNamespace(sequences=[sequence])

        return answer()


class Counting:
    """Asks again until the model answers 1. Each answer earns the number of answers so far."""

    def __init__(self, facts: Facts) -> None:
        self.turn = 0

    async def begin(self) -> Sequence[Message]:
        return [Message(role="user", content="Count")]

    async def answered(self, text: str) -> Reply:
        self.turn += 1
        again = [Message(role="user", content=f"Again, {self.turn}")]
        return Reply(float(self.turn), () if text == "1" else again, {"turns": 1.0})


def environment(facts: Facts) -> Any:
    async def earns(facts: Facts, text: str) -> float:
        assert facts["answer"] == "Green"
        return float(text)

    return Asked(facts, earns)


async def test_a_group_is_one_request_and_each_answer_gets_its_reward(
    tokenizer: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, tokenized = Echo(tokenizer), list[Any]()
    prompt = renderer.prompt
    monkeypatch.setattr(renderer, "prompt", lambda *given: (tokenized.append(given), prompt(*given))[1])
    rollouts = Rollouts(renderer, environment, group_size=3, max_tokens=4)
    groups = await rollouts.groups(sampler, [ROW, ROW], [7, 0])
    assert [[one.reward for one in group] for group in groups] == [[0.0, 1.0, 2.0]] * 2
    assert [asked[1] for asked in sampler.asked] == [3, 3]
    assert len(tokenized) == 2, "equal conversations are tokenized once"
    assert len({asked[2] for asked in sampler.asked}) == 2  # each row has its own seed
    again = Echo(tokenizer)
    await rollouts.groups(again, [ROW, ROW], [7, 0])
    assert again.asked == sampler.asked
    await rollouts.groups(again, [ROW], [7, 1])
    assert again.asked[-1][2] not in {asked[2] for asked in sampler.asked}


async def test_an_environment_leads_several_turns(tokenizer: Any, renderer: Renderer) -> None:
    sampler = Echo(tokenizer)
    (group,) = await Rollouts(renderer, Counting, group_size=3, max_tokens=4, max_turns=3).groups(sampler, [ROW], [1])
    # First turn: 0, 1 (ends) and 2. The other two conversations differ, so each sends its own requests: always "0".
    assert [len(one.turns) for one in group] == [3, 1, 3]
    assert [one.reward for one in group] == [6.0, 1.0, 6.0]
    assert [one.parts for one in group] == [{"turns": 3.0}, {"turns": 1.0}, {"turns": 3.0}]
    assert [one.answered for one in group] == [[1, 3, 5], [1], [1, 3, 5]]
    assert [asked[1] for asked in sampler.asked] == [3, 1, 1, 1, 1]
    assert [[len(each.turns) for each in one.trajectories()] for one in group] == [[3], [1], [3]]
    said = (
        "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nAgain, 1<|im_end|>\n"
    )
    assert sampler.asked[2][0] == said + "<|im_start|>assistant\n"


class Hinting(Counting):
    """Changes the messages of its facts."""

    def __init__(self, facts: Facts) -> None:
        self.prompt = facts["prompt"]
        super().__init__(facts)

    async def begin(self) -> Sequence[Message]:
        self.prompt[-1]["content"] += " In a word."
        return list(self.prompt)


async def test_an_environment_that_changes_its_facts_changes_no_row(tokenizer: Any, renderer: Renderer) -> None:
    sampler, rollouts = Echo(tokenizer), Rollouts(renderer, Hinting, group_size=3, max_tokens=4)
    for step in range(2):
        await rollouts.groups(sampler, [ROW], [step])
    hinted = "<|im_start|>user\nWhich colour is grass? In a word.<|im_end|>\n<|im_start|>assistant\n"
    assert [asked[:2] for asked in sampler.asked] == [(hinted, 3)] * 2


class Stopping(Counting):
    """Gives 100 for a conversation that ends without the environment's decision."""

    async def stopped(self) -> Reply:
        return Reply(100.0, (), {"turns": 0.5})


async def test_environment_rewards_an_unfinished_conversation(tokenizer: Any, renderer: Renderer) -> None:
    rollouts = Rollouts(renderer, Stopping, group_size=3, max_tokens=4, max_turns=2)
    (group,) = await rollouts.groups(Echo(tokenizer), [ROW], [1])
    assert [one.reward for one in group] == [103.0, 1.0, 103.0]  # "1" ends the second conversation
    assert [one.parts["turns"] for one in group] == [2.5, 1.0, 2.5]


FIRST = SampledTurn([5, 6, 7], [8, 9], np.array([-0.5, -1.5]), "req-1-0")
SECOND = SampledTurn([5, 6, 7, 8, 9, 4], [3], np.array([-2.5]), "req-2-0")


def test_loss_covers_only_answer_tokens() -> None:
    datum = Trajectory([FIRST]).datum(np.array([2.0, -2.0]))
    inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert inputs["target_tokens"] == [6, 7, 8, 9]
    assert inputs["logprobs"] == [0.0, 0.0, -0.5, -1.5]
    assert inputs["advantages"] == [0.0, 0.0, 2.0, -2.0]


def test_turns_that_extend_the_tokens_before_are_one_datum() -> None:
    (both,) = Episode(turns=[FIRST, SECOND]).trajectories()
    datum = both.datum(np.array([1.0, 2.0, 3.0]))
    inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [5, 6, 7, 8, 9, 4]
    assert inputs["target_tokens"] == [6, 7, 8, 9, 4, 3]
    assert inputs["logprobs"] == [0.0, 0.0, -0.5, -1.5, 0.0, -2.5]
    assert inputs["advantages"] == [0.0, 0.0, 1.0, 2.0, 0.0, 3.0]


def test_data_name_the_samples_of_all_their_tokens() -> None:
    def new(turn: SampledTurn, offset: int, length: int) -> PromptProvenanceSpan:
        return PromptProvenanceSpan(sequence_id=turn.sequence_id, offset=offset, length=length)

    def answered(turn: SampledTurn, length: int) -> SampledProvenanceSpan:
        return SampledProvenanceSpan(sequence_id=turn.sequence_id, length=length)

    one, both = (Trajectory(turns).datum(np.ones(n)) for turns, n in (([FIRST], 2), ([FIRST, SECOND], 3)))
    assert one.model_input_spans == [new(FIRST, 0, 3), answered(FIRST, 1)]
    assert one.loss_fn_input_spans == [new(FIRST, 1, 2), answered(FIRST, 2)]
    assert both.model_input_spans == [new(FIRST, 0, 3), answered(FIRST, 2), new(SECOND, 5, 1), answered(SECOND, 0)]
    assert both.loss_fn_input_spans == [new(FIRST, 1, 2), answered(FIRST, 2), new(SECOND, 5, 1), answered(SECOND, 1)]


def test_turn_whose_prompt_drops_tokens_starts_a_new_datum() -> None:
    dropped = SampledTurn([5, 6, 7, 9, 4], [3], np.array([-2.5]), "req-2-0")
    longer = SampledTurn([5, 6, 7, 9, 4, 3, 1], [2], np.array([-1.0]), "req-3-0")
    found = Episode(turns=[FIRST, dropped, longer]).trajectories()
    assert [each.turns for each in found] == [[FIRST], [dropped, longer]]


async def test_sampled_tokens_of_all_turns_are_compared_in_one_request() -> None:
    asked = []

    class Other:
        async def compute_logprobs(self, tokens: Any, prompt_logprobs_last_n: int) -> list[float]:
            asked.append((tokens.to_ints(), prompt_logprobs_last_n))
            return [float(-token) for token in tokens.to_ints()[-prompt_logprobs_last_n:]]

    found = await Trajectory([FIRST, SECOND]).logprobs_by(Other())  # type: ignore[arg-type]
    assert asked == [([5, 6, 7, 8, 9, 4, 3], 4)]
    assert found.tolist() == [-8.0, -9.0, -3.0]
    seen = await Trajectory([FIRST, SECOND]).logprobs_by(Other(), [1, 2])  # type: ignore[arg-type]
    assert asked[1:] == [([1, 2, 8, 9, 4, 3], 4)] and seen.tolist() == found.tolist(), "after a prompt of its own"


async def test_rewards_are_named_by_their_import_path() -> None:
    make = environment_maker("tinkerflow.tasks.pipelines.rewards:holds_answer", "")
    facts = facts_of(ROW)
    assert facts == {"prompt": [{"role": "user", "content": "Which colour is grass?"}], "answer": "Green"}
    assert (await make(facts).answered("It is green.")).reward == 1.0
    assert (await unrewarded(facts).answered("It is green.")).reward == 0.0
    assert (is_answer(facts, " Green\n"), is_answer(facts, "green"), holds_answer(facts, "red")) == (1.0, 0.0, 0.0)
    assert facts_of(parse({"prompt": "a", "completion": "b"}))["completion"] == "b"
    with pytest.raises(UserError, match=r"environment 'math:pi': must be a function or a class"):
        environment_maker("", "math:pi")


class Failing(Counting):
    """Fails on rows with a `fault`: by an exception, an invalid reward or invalid messages."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.fault = facts.get("fault", 1.0)
        if self.fault == "make":
            raise KeyError("answer")

    async def begin(self) -> Sequence[Message]:
        return [] if self.fault == "message" else await super().begin()

    async def answered(self, text: str) -> Reply:
        if self.fault == "answered":
            raise ValueError("no")
        if self.fault == "exit":
            sys.exit("bye")
        return Reply(self.fault)


class Plain(Counting):
    """An environment with a `begin` that is not async."""

    def begin(self) -> Any:
        return []


class Pair(Counting):
    """Returns a tuple instead of a Reply."""

    async def answered(self, text: str) -> Any:
        return 0.5, True


async def test_methods_with_a_wrong_signature_are_named(tokenizer: Any, renderer: Renderer) -> None:
    with pytest.raises(UserError, match=rf"^`begin` of {__name__}:Plain must be `async def`$"):
        environment_maker("", f"{__name__}:Plain")
    with pytest.raises(UserError, match=rf"^{__name__}:Echo has no method `async def begin`$"):
        environment_maker("", f"{__name__}:Echo")
    for make, error in (
        (Plain, "`begin` of Plain must"),
        (Pair, "`answered` must return a Reply, got tuple (0.5, True)"),
    ):
        with pytest.raises(UserError, match=re.escape(error)):
            await Rollouts(renderer, make, 2, 4).groups(Echo(tokenizer), [ROW], [1])


FAULTS: dict[Any, str] = {
    "make": "KeyError: 'answer'",
    "answered": "ValueError: no",
    "exit": "SystemExit: bye",
    "message": "messages: ",
} | dict.fromkeys(["1", None, float("nan"), float("inf")], "finite number")


async def test_names_of_parts_become_texts(tokenizer: Any, renderer: Renderer) -> None:
    class Numbered(Counting):
        async def answered(self, text: str) -> Reply:
            return Reply(1.0, parts={1: 0.5, "1": 0.25})  # type: ignore[dict-item]

    (group,) = await Rollouts(renderer, Numbered, 2, 4).groups(Echo(tokenizer), [ROW], [1])
    record = group_of(group, np.zeros(2), rewarded=True)
    assert [sample.parts for sample in record.samples] == [{"1": 0.75}] * 2


@pytest.mark.parametrize("wrong", ["Again", {"role": "user", "content": "Again"}, [{"content": "Again"}], None])
async def test_wrong_messages_of_an_environment_are_named(tokenizer: Any, renderer: Renderer, wrong: Any) -> None:
    class Last(Counting):
        async def answered(self, text: str) -> Reply:
            return Reply(1.0, wrong)

    class First(Counting):
        async def begin(self) -> Sequence[Message]:
            return wrong  # type: ignore[no-any-return]

    for make, answer in ((Last, "; answer: '0'"), (First, "")):
        rollouts = Rollouts(renderer, make, 2, 4)
        rule = f"must be a list of messages, each with `role` and `content`{answer}$"
        with pytest.raises(UserError, match=rf"environment: its messages are .*: {rule}"):
            await rollouts.groups(Echo(tokenizer), [ROW], [1])


@pytest.mark.parametrize("fault", FAULTS)
async def test_failing_row_is_left_out_while_the_data_allows_it(tokenizer: Any, renderer: Renderer, fault: Any) -> None:
    bad = Row(({"role": "user", "content": "Bad"},), extra={"fault": fault})
    rollouts = Rollouts(renderer, Failing, 2, 4, max_bad_fraction=0.5)
    groups = await rollouts.groups(Echo(tokenizer), [ROW, bad], [1])
    assert [[episode.reward for episode in group] for group in groups] == [[1.0, 1.0]]
    (failure,) = rollouts.failures.values()
    assert failure.startswith("'Bad': ") and FAULTS[fault] in failure
    rollouts.refuse_failures(2)
    with pytest.raises(
        UserError, match=r"1 of 3 rows is wrong, at most 0\.0% may be left out \(data\.max_bad_fraction\); first: 'Bad'"
    ):
        Rollouts(renderer, Failing, 2, 4, failures=rollouts.failures).refuse_failures(3)
    many = {n: f"'row {n}': a fault" for n in range(5)}
    few = r"5 of 9 rows are wrong, .*: 'row 0': a fault; 'row 1': a fault; 'row 2': a fault; and 2 more; all: the log"
    with pytest.raises(UserError, match=few):
        Rollouts(renderer, Failing, 2, 4, failures=many).refuse_failures(9)
    earlier = {0: "a row that failed in another step"}
    with pytest.raises(UserError, match="all 1 rows of this step failed; the first one: 'Bad': "):
        await Rollouts(renderer, Failing, 2, 4, failures=earlier).groups(Echo(tokenizer), [bad], [1])


async def test_failing_rows_count_even_if_their_prompts_begin_alike(tokenizer: Any, renderer: Renderer) -> None:
    asked = "Solve the problem step by step. " * 3
    bad = [Row(({"role": "user", "content": f"{asked}{n}"},), extra={"fault": "answered"}) for n in range(2)]
    rollouts = Rollouts(renderer, Failing, 2, 4, max_bad_fraction=0.2)
    await rollouts.groups(Echo(tokenizer), [ROW, *bad, *bad], [1])
    with pytest.raises(UserError, match=r"^2 of 9 rows are wrong"):
        rollouts.refuse_failures(9)
    rollouts.refuse_failures(10)


@pytest.mark.parametrize("reward", [np.float32(0.5), np.bool_(True), np.int64(2), np.array(0.25), Decimal("0.5")])
def test_numbers_of_any_library_are_rewards(reward: Any) -> None:
    assert checked_reward(reward) == float(reward)
    for wrong in (np.float32("nan"), np.zeros(2), 10**400, 1j, "1", None):
        with pytest.raises(UserError, match="must be a finite number"):
            checked_reward(wrong)


def missing(facts: Facts, text: str) -> float:
    return float(facts["missing"])


def not_a_number(facts: Facts, text: str) -> float:
    return float("nan")


def scored_by(reward: Any, **changes: Any) -> dict[str, Any]:
    return {"make": lambda facts: Asked(facts, reward), "judge": f"reward {__name__}:{reward.__name__}"} | changes


async def test_reward_error_names_its_place_and_the_answer(
    tokenizer: Any, renderer: Renderer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("tinkerflow.tasks.pipelines.rollouts.log_line", lambda text, level: lines.append(text))
    place = f"{__file__}:{missing.__code__.co_firstlineno + 1}"
    line = f"reward {__name__}:missing: KeyError: 'missing' ({place}); answer: '0'"
    rollouts = Rollouts(renderer, **scored_by(missing), group_size=2, max_tokens=4)
    with pytest.raises(UserError, match=rf"of this step failed; the first one: 'Which .*': {re.escape(line)}$"):
        await rollouts.groups(Echo(tokenizer), [ROW], [1])
    assert line in caplog.text and "return float(facts[" in lines[0]
    rollouts = Rollouts(renderer, **scored_by(not_a_number), group_size=2, max_tokens=4)
    with pytest.raises(UserError, match=r":not_a_number: its reward is nan: must be a finite number; answer: '0'$"):
        await rollouts.groups(Echo(tokenizer), [ROW], [1])


def first_match(facts: Facts, text: str) -> float:
    return next(1.0 for word in text.split() if word == "right")


async def test_stop_iteration_of_a_plain_reward_fails_its_row(tokenizer: Any, renderer: Renderer) -> None:
    place = re.escape(f"({__file__}:{first_match.__code__.co_firstlineno + 1})")
    limits = {"environment_seconds": 5.0, "environment_retries": 0}
    rollouts = Rollouts(renderer, **scored_by(first_match, **limits), group_size=2, max_tokens=4)
    with pytest.raises(UserError, match=rf":first_match: RuntimeError: .*StopIteration.* {place}; answer: '0'$"):
        await rollouts.groups(Echo(tokenizer), [ROW], [1])


async def cancelling(facts: Facts, text: str) -> float:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    return float(await task or 0.0)


def cancelling_plainly(facts: Facts, text: str) -> float:
    return asyncio.run(cancelling(facts, text))


@pytest.mark.parametrize("reward", [cancelling, cancelling_plainly])
async def test_cancelled_task_of_a_reward_fails_its_row(tokenizer: Any, renderer: Renderer, reward: Any) -> None:
    rollouts = Rollouts(renderer, **scored_by(reward), group_size=2, max_tokens=4)
    with pytest.raises(UserError, match=rf":{reward.__name__}: RuntimeError: it awaited a task that was cancelled"):
        await rollouts.groups(Echo(tokenizer), [ROW], [1])


async def test_plain_rewards_are_called_in_threads_in_the_order_of_samples(tokenizer: Any, renderer: Renderer) -> None:
    threads, numbers = set(), iter(range(100))

    def reward(facts: Facts, text: str) -> float:
        threads.add(threading.current_thread())
        return float(next(numbers))

    groups = await Rollouts(renderer, **scored_by(reward), group_size=3, max_tokens=4).groups(
        Echo(tokenizer), [ROW, ROW], [1]
    )
    assert [[one.reward for one in group] for group in groups] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert threading.main_thread() not in threads


async def test_slow_reward_is_named_with_its_limit(
    tokenizer: Any, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()

    def plain(facts: Facts, text: str) -> float:
        return float(over.wait())

    async def asynchronous(facts: Facts, text: str) -> float:
        return float(await asyncio.get_running_loop().create_future())

    for reward in (plain, asynchronous):
        rollouts = Rollouts(renderer, **scored_by(reward, environment_seconds=0.05), group_size=2, max_tokens=4)
        caplog.clear()
        reason = rf"reward {__name__}:{reward.__name__}: took longer than environment_seconds, 0\.05 s: raise it, or "
        with pytest.raises(EnvironmentUnavailableError, match=f"all conversations of this step .* last one: {reason}"):
            await rollouts.groups(Echo(tokenizer), [ROW], [1])
        assert len(logged_by(caplog, Rollouts.__module__)) == 1, "six conversations are interrupted for one reason"
    over.set()


async def test_code_that_blocks_the_event_loop_is_named_and_interrupted(
    tokenizer: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, lines = threading.Event(), list[str]()

    def log_line(line: str, level: int) -> None:
        lines.append(line)
        if "whole run waits" in line:
            reported.set()

    class Blocking(Counting):
        async def answered(self, text: str) -> Reply:
            reported.wait()
            return Reply(1.0)

    monkeypatch.setattr("tinkerflow.tasks.pipelines.rollouts.log_line", log_line)
    limits = {"environment_seconds": 0.2, "environment_retries": 0}
    rollouts = Rollouts(renderer, Blocking, 1, 4, **limits)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentUnavailableError, match="all conversations of this step"):
        await rollouts.groups(Echo(tokenizer), [ROW], [1])
    place = rf"\.Blocking\.answered \({__file__}:{Blocking.answered.__code__.co_firstlineno + 1}\)"
    blocks, interrupted = lines
    assert re.search(f"{place} blocks the event loop, and the whole run waits: .* asyncio.to_thread", blocks)
    assert interrupted.startswith("row 'Which colour is grass?': a conversation is interrupted: environment: took ")
    assert "0.2 s, and blocked the event loop" in interrupted


async def test_reward_is_not_called_after_its_row_failed(tokenizer: Any, renderer: Renderer) -> None:
    asked = []

    async def reward(facts: Facts, text: str) -> float:
        if text == "0":
            raise ValueError("no")
        await asyncio.sleep(0)
        asked.append(text)
        return 1.0

    with pytest.raises(UserError, match="ValueError: no"):
        await Rollouts(renderer, **scored_by(reward), group_size=3, max_tokens=4).groups(Echo(tokenizer), [ROW], [1])
    assert asked == ["1", "2"]


class Unavailable(Counting):
    """An environment that becomes unavailable once at each place in `left`, and takes too long at "slow"."""

    left: ClassVar[list[str]] = []
    closed: ClassVar[list[Unavailable]] = []

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._die("make")

    def _die(self, where: str) -> None:
        if where in self.left:
            self.left.remove(where)
            raise EnvironmentUnavailableError("killed")

    async def begin(self) -> Sequence[Message]:
        self._die("begin")
        return await super().begin()

    async def answered(self, text: str) -> Reply:
        if text == "0":
            self._die("answered")
        if text == "2" and "slow" in self.left:
            self.left.remove("slow")
            await asyncio.sleep(60)
        return await super().answered(text)

    async def close(self) -> None:
        self.closed.append(self)


@pytest.mark.parametrize("deaths", [["make"], ["begin"], ["answered"], ["slow"], ["answered", "slow"]])
async def test_conversation_with_a_lost_environment_is_restarted(
    tokenizer: Any, renderer: Renderer, deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unavailable, "left", [*deaths])
    monkeypatch.setattr(Unavailable, "closed", [])
    rollouts = Rollouts(renderer, Unavailable, 3, 4, environment_seconds=0.5)
    sampler = Echo(tokenizer)
    (group,) = await rollouts.groups(sampler, [ROW], [1])
    assert sorted(episode.attempt for episode in group)[-len(deaths) :] == [1] * len(deaths)
    assert len(group) == 3 and len(Unavailable.closed) == 3 + len(deaths) - deaths.count("make")
    assert all(len(episode.turns) == 1 for episode in group) and not rollouts.failures
    assert len({seed for _, _, seed in sampler.asked}) == len(sampler.asked), "a repeated sample has a new seed"


async def test_a_conversation_without_an_environment_is_left_out_of_its_group(
    tokenizer: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unavailable, "left", ["begin"] * 4)
    rollouts = Rollouts(renderer, Unavailable, 3, 4, environment_retries=1)
    ((one, other),) = await rollouts.groups(Echo(tokenizer), [ROW], [1])
    assert (one.attempt, other.attempt) == (1, 1)
    monkeypatch.setattr(Unavailable, "left", ["begin"] * 100)
    earlier = {0: "a row that failed in another step"}
    with pytest.raises(EnvironmentUnavailableError, match="interrupted; the last one: environment: EnvironmentUn"):
        await Rollouts(renderer, Unavailable, 3, 4, failures=earlier).groups(Echo(tokenizer), [ROW], [1])


@pytest.mark.parametrize(("places", "most"), [(None, 5), (2, 2)])
async def test_a_row_waits_for_a_place(tokenizer: Any, renderer: Renderer, places: int | None, most: int) -> None:
    begun, together = 0, list[int]()

    class Counted(Counting):
        async def begin(self) -> Sequence[Message]:
            nonlocal begun
            begun += 1
            together.append(begun)
            await asyncio.sleep(0.01)
            return await super().begin()

        async def close(self) -> None:
            nonlocal begun
            begun -= 1

    limit = None if places is None else asyncio.Semaphore(places)
    rollouts = Rollouts(renderer, Counted, group_size=1, max_tokens=4, places=limit)
    assert len(await rollouts.groups(Echo(tokenizer), [ROW] * 5, [1])) == 5
    assert max(together) == most


async def test_a_conversation_ends_when_its_context_is_full(tokenizer: Any, renderer: Renderer) -> None:
    first = len(renderer.prompt([{"role": "user", "content": "Count"}]))
    rollouts = Rollouts(renderer, Counting, 2, 4, max_turns=3, max_context=first + 4)
    ((one, other),) = await rollouts.groups(Echo(tokenizer), [ROW], [1])
    assert (len(one.turns), len(other.turns)) == (1, 1)
    with pytest.raises(UserError, match="an answer may have 4: the context has 5"):
        await Rollouts(renderer, Counting, 2, 4, max_context=5).groups(Echo(tokenizer), [ROW], [1])


def test_tool_calls_that_cannot_be_passed_on_stay_in_the_text() -> None:
    def written(name: str, arguments: str) -> str:
        return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'

    wrong = [
        written('"f"', r'{"a": "\ud800"}'),
        written("5", "{}"),
        written('"f"', "[" * 10**5),
        written('"f"', '{"a"'),
    ]
    wrong.append(written('"f"', "[" * 10**5 + "]" * 10**5))
    right = written('"f"', r'{"a": "\ud83d\ude00"}')
    assert called_tools("".join([*wrong, right])) == ("".join(wrong), [{"name": "f", "arguments": {"a": "\U0001f600"}}])
