"""Rewards for rows with an `answer`, for the parameter `reward` of `rl`. Write other rewards in your own modules."""

from __future__ import annotations

from tinkerflow.tasks.pipelines.environments import Facts


def is_answer(facts: Facts, text: str) -> float:
    """1 if the text equals the row's `answer`, ignoring surrounding spaces; else 0."""
    return float(text.strip() == str(facts["answer"]).strip())


def holds_answer(facts: Facts, text: str) -> float:
    """1 if the text contains the row's `answer`, ignoring case; else 0."""
    return float(str(facts["answer"]).strip().lower() in text.lower())
