"""Rewards for rows with an `answer`, to name in `reward` of the pipeline `rl`; write others in modules of your own."""

from __future__ import annotations

from tinkerflow.tasks.pipelines.environments import Facts


def is_answer(facts: Facts, text: str) -> float:
    """1 when the text is the row's `answer`, spaces around it aside; else 0."""
    return float(text.strip() == str(facts["answer"]).strip())


def holds_answer(facts: Facts, text: str) -> float:
    """1 when the row's `answer` occurs in the text, else 0; large and small letters are the same."""
    return float(str(facts["answer"]).strip().lower() in text.lower())
