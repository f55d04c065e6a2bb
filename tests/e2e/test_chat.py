"""OpenAI's and Anthropic's clients get the same tokens and logprobs from trained models as the SDK's sampler.

litellm and lm-eval work without changes, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tinker
from tinker import types
from transformers import PreTrainedTokenizerBase

from tinkerflow.backend.compute.sampler.pages import PAGE

pytestmark = pytest.mark.thorough

HI: Any = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
LENGTH = 40


@pytest.fixture(scope="module")
def gpt(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="tml-test", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Any) -> Iterator[Any]:
    import anthropic  # here, because the import takes seconds in each process that collects tests

    with anthropic.Anthropic(base_url=server.api_url, api_key="tml-test", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def taught(server: Any, make_datum: Callable[..., tinker.Datum]) -> dict[str, str]:
    """Paths of weights by their learned answers: a greeting, and a tool call."""
    client = server.client()
    return {name: teach(client, server.base_model, make_datum, *said) for name, said in LESSONS.items()}


LESSONS: dict[str, tuple[str, list[Any]]] = {"greets": ("I am a helpful model.", []), "calls": (CALL, TOOLS)}


def teach(client: Any, base_model: str, make_datum: Any, answer: str, tools: list[Any]) -> str:
    trainer = client.create_lora_training_client(base_model=base_model, rank=32, seed=1).result()
    tokenizer = trainer.get_tokenizer()
    prompt = tokenized(tokenizer, tools)
    tokens = prompt + tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
    lesson = make_datum(tokens, [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt)))
    for _ in range(30):
        step = trainer.forward_backward([lesson], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
        step.result()
    return str(trainer.save_weights_for_sampler("taught").result().path)


def tokenized(tokenizer: PreTrainedTokenizerBase, tools: list[Any], messages: Any = HI) -> list[int]:
    """The prompt that the chat template makes in transformers."""
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def chat(gpt: openai.OpenAI, model: str, tools: list[Any]) -> Any:
    more: Any = {"tools": tools} if tools else {}
    return gpt.chat.completions.create(
        model=model, messages=HI, temperature=0, max_tokens=LENGTH, logprobs=True,
        extra_body={"return_token_ids": True}, **more,
    )  # fmt: skip


def facts(done: Any) -> tuple[list[int], list[int], list[float]]:
    choice = done.choices[0]
    return done.prompt_token_ids, choice.token_ids, [entry.logprob for entry in choice.logprobs.content]


def test_chat_gives_the_greedy_tokens_and_logprobs_of_the_sampling_client(
    server: Any, gpt: openai.OpenAI, taught: dict[str, str]
) -> None:
    client, expected, asked = server.client(), [], []
    for model, tools in [(server.base_model, []), (taught["greets"], []), (taught["calls"], TOOLS)]:
        named = {"base_model": model} if model == server.base_model else {"model_path": model}
        sampler = client.create_sampling_client(**named).result()
        prompt = tokenized(sampler.get_tokenizer(), tools)
        params = types.SamplingParams(max_tokens=LENGTH, temperature=0.0)
        (one,) = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences
        expected.append((prompt, list(one.tokens), list(one.logprobs or [])))
        asked.append((model, tools))
    alone = [chat(gpt, *one) for one in asked]
    assert [facts(done) for done in alone] == expected
    with ThreadPoolExecutor(len(asked)) as threads:  # the base model and two adapters in one batch
        together = list(threads.map(lambda one: chat(gpt, *one), asked))
    for done, (prompt, tokens, logprobs) in zip(together, expected, strict=True):
        assert facts(done)[:2] == (prompt, tokens)
        assert facts(done)[2] == pytest.approx(logprobs, abs=1e-5)  # a batch of four rows sums in another order


def test_adapter_answers_differently_from_its_base_model(
    server: Any, gpt: openai.OpenAI, claude: Any, taught: dict[str, str]
) -> None:
    base, greets = chat(gpt, server.base_model, []), chat(gpt, taught["greets"], [])
    assert greets.choices[0].message.content == "I am a helpful model."
    assert greets.choices[0].finish_reason == "stop"
    assert base.choices[0].message.content != greets.choices[0].message.content
    run = taught["greets"].removeprefix("tinker://").split("/")[0]
    assert chat(gpt, run, []).choices[0].message.content == "I am a helpful model."
    said = claude.messages.create(model=run, max_tokens=LENGTH, messages=HI, extra_body={"temperature": 0})
    assert [block.to_dict() for block in said.content] == [{"type": "text", "text": "I am a helpful model."}]


def test_next_turn_of_a_conversation_finds_the_last_answer_in_the_prefix_cache(
    server: Any, gpt: openai.OpenAI, taught: dict[str, str]
) -> None:
    """Answers are prefilled while the group is idle, so the second turns of some conversations may come too early."""
    tokenizer = server.client().create_sampling_client(model_path=taught["greets"]).result().get_tokenizer()
    asked: Any = {"model": taught["greets"], "temperature": 0, "max_tokens": LENGTH}
    asked["extra_body"] = {"return_token_ids": True}
    for number in range(40):
        messages: Any = [{"role": "user", "content": f"Conversation {number}. Hi"}]
        while len(tokenized(tokenizer, [], messages)) < PAGE - 4:
            messages[0]["content"] += " Hi"
        first = gpt.chat.completions.create(messages=messages, **asked)
        known = first.prompt_token_ids + first.choices[0].token_ids
        messages += [{"role": "assistant", "content": first.choices[0].message.content}, *HI]
        second = gpt.chat.completions.create(messages=messages, **asked)
        if second.prompt_token_ids[: len(known)] == known:  # the answer's text is tokenized as it was sampled
            pages = len(known) // PAGE * PAGE
            assert len(first.prompt_token_ids) < pages
            if second.usage.prompt_tokens_details.cached_tokens >= pages:
                return
    pytest.fail("no answer was found in the prefix cache")


def test_a_tool_is_called_whole_and_in_streams_of_both_forms(
    gpt: openai.OpenAI, claude: Any, taught: dict[str, str]
) -> None:
    whole = chat(gpt, taught["calls"], TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("weather", '{"city": "Rome"}')
    ]
    asked: Any = {"model": taught["calls"], "messages": HI, "tools": TOOLS, "temperature": 0}
    with gpt.chat.completions.stream(**asked) as stream:
        parsed = stream.get_final_completion().choices[0]
    assert parsed.finish_reason == "tool_calls"
    assert [call.function.arguments for call in parsed.message.tool_calls or []] == ['{"city": "Rome"}']
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    with claude.messages.stream(
        model=taught["calls"], max_tokens=LENGTH, messages=HI, tools=tools, extra_body={"temperature": 0}
    ) as events:
        message = events.get_final_message()
    assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == [
        ("weather", {"city": "Rome"})
    ]
    assert message.stop_reason == "tool_use"


def test_required_call_and_schema_hold_for_an_untrained_model(server: Any, gpt: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: Any = {"model": server.base_model, "messages": HI, "max_tokens": 200, "seed": 1}
    done = gpt.chat.completions.create(**asked, response_format=form)
    assert 0 <= json.loads(done.choices[0].message.content or "")["answer"] <= 99
    tools: Any = [{"type": "function", "function": {"name": "count", "parameters": schema}}, *TOOLS]
    named: Any = {"type": "function", "function": {"name": "count"}}
    done = gpt.chat.completions.create(**asked, tools=tools, tool_choice=named)
    (call,) = done.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "count"
    assert 0 <= json.loads(call.function.arguments)["answer"] <= 99
    assert done.choices[0].finish_reason == "tool_calls"


@pytest.mark.filterwarnings("default")  # these packages' warnings are not ours
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_chats_streams_and_calls_tools(
    server: Any, taught: dict[str, str], provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import queries GitHub
    import litellm

    base = f"{server.api_url}/v1" if provider == "openai" else server.api_url
    given: Any = {"api_base": base, "api_key": "tml-test", "max_tokens": LENGTH, "temperature": 0, "max_retries": 0}
    greets: Any = {**given, "model": f"{provider}/{taught['greets']}"}
    calls: Any = {**given, "model": f"{provider}/{taught['calls']}", "tools": TOOLS}
    said = litellm.completion(**greets, messages=HI).choices[0]
    assert (said.message.content, said.finish_reason) == ("I am a helpful model.", "stop")
    parts = litellm.completion(**greets, messages=HI, stream=True, stream_options={"include_usage": True})
    assert litellm.stream_chunk_builder(list(parts)).choices[0].message.content == "I am a helpful model."
    whole = litellm.completion(**calls, messages=HI).choices[0].message
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**calls, messages=HI, stream=True)))
    for message in (whole, streamed.choices[0].message):
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
        # litellm gets its own message back, with litellm's additions.
        message.provider_specific_fields = {"refusal": None}
        assert litellm.completion(**calls, messages=[*HI, message, result]).usage.completion_tokens > 0


@pytest.mark.filterwarnings("default")  # these packages' warnings are not ours
def test_litellm_gives_logprobs_and_holds_schemas(
    server: Any, gpt: openai.OpenAI, taught: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    given: Any = {"api_base": f"{server.api_url}/v1", "api_key": "tml-test", "messages": HI, "max_retries": 0}
    done = litellm.completion(
        **given, model=f"openai/{taught['greets']}", temperature=0, max_tokens=LENGTH, logprobs=True, top_logprobs=2
    )
    expected = facts(chat(gpt, taught["greets"], []))[2]
    assert [entry.logprob for entry in done.choices[0].logprobs.content] == pytest.approx(expected, abs=1e-5)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    held = litellm.completion(
        **given, model=f"openai/{server.base_model}", max_tokens=200, seed=1, response_format=form
    )
    assert json.loads(held.choices[0].message.content)["a"] in (True, False)


@pytest.mark.filterwarnings("default")  # these packages' warnings are not ours
def test_lm_eval_scores_choices_and_texts_and_generates(
    server: Any, taught: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "tml-test")
    import lm_eval

    sampler = server.client().create_sampling_client(model_path=taught["greets"]).result()
    tokenizer = sampler.get_tokenizer()
    asked, choices = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ["I am a helpful model.", "Go away."]
    docs = tmp_path / "docs.jsonl"
    docs.write_text(json.dumps({"asked": asked, "hi": "Hi", "choices": choices}))
    task: Any = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(docs)}}, "test_split": "test"}
    scored: Any = {"output_type": "multiple_choice", "doc_to_text": "{{asked}}", "doc_to_choice": "{{choices}}"}
    rolling: Any = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{asked}}"}
    made: Any = {"output_type": "generate_until", "doc_to_text": "{{hi}}", "doc_to_target": "{{choices[0]}}"}
    made["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": LENGTH}

    def evaluate(model: str, path: str, *tasks: Any, **more: Any) -> Any:
        args = {"model": taught["greets"], "base_url": f"{server.api_url}/v1/{path}", "max_retries": 1}
        return lm_eval.simple_evaluate(
            model=model,
            model_args=args | more,
            tasks=list(tasks),
            bootstrap_iters=0,
            apply_chat_template="chat" in path,
        )

    done = evaluate(
        "local-completions",
        "completions",
        {
            **task,
            **scored,
            "task": "choices",
            "doc_to_target": 0,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        {**task, **rolling, "task": "rolling", "metric_list": [{"metric": "word_perplexity"}]},
        tokenizer=tokenizer.name_or_path,
        tokenizer_backend="huggingface",
        max_length=2048,
    )
    assert done["results"]["choices"]["acc,none"] == 1.0
    (one,) = done["samples"]["choices"]
    for ((logprob, _),), choice in zip(one["resps"], choices, strict=True):
        tokens, first = tokenizer.encode(asked + choice), len(tokenizer.encode(asked.rstrip()))  # split as in lm-eval
        known = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert float(logprob) == pytest.approx(sum(known[first:]), abs=1e-4)
    chatted = evaluate(
        "local-chat-completions",
        "chat/completions",
        {**task, **made, "task": "chat", "metric_list": [{"metric": "exact_match"}]},
    )
    assert chatted["results"]["chat"]["exact_match,none"] == 1.0
