"""Pig latin, the quickstart's lesson: three phrases that a trained model repeats exactly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """An English phrase and its pig latin."""

    english: str
    pig_latin: str

    @property
    def prompt(self) -> str:
        return f"English: {self.english}\nPig Latin:"

    @property
    def completion(self) -> str:
        """The expected answer; the newline ends it."""
        return f" {self.pig_latin}\n"


LESSONS = (
    Lesson("banana split", "anana-bay plit-say"),
    Lesson("quantum physics", "uantum-qay ysics-phay"),
    Lesson("coding wizard", "oding-cay izard-way"),
)
