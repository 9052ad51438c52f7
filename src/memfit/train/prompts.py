"""What a run file says of texts that the model writes while it is trained. Torch-free; they are written in `generation`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """Every so many steps, and at the end, the model goes on from prompts of yours, so that one can read what it has learnt. For causal-lm.

    Attributes:
        prompts: texts to go on from; with data.messages each is what a user says.
        every: optimizer steps between.
        max_new_tokens: tokens that are written at most. With those of the prompt they are no more than a sample has, for which memory is planned.
        temperature: 0 takes the most likely token each time (greedy). Above, tokens are drawn by their probabilities, 1, or more evenly, above 1.
        top_p: tokens are drawn among the most likely ones that have this probability together; 1 is among all.
        seed: of what is drawn; training draws from generators of its own.
    """

    prompts: tuple[str, ...]
    every: int = 100
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError('generate.prompts: give texts that the model goes on from, such as ["Once upon a time"]')
        for name, value, least in (("every", self.every, 1), ("max_new_tokens", self.max_new_tokens, 1)):
            if value < least:
                raise ConfigError(f"generate.{name}: {value} is less than {least}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"generate.temperature: {self.temperature} is no temperature: write 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"generate.top_p: {self.top_p} is no share above 0 and up to 1")
        if self.top_p < 1 and not self.temperature:
            raise ConfigError(
                "generate.top_p: at temperature 0 nothing is drawn: set generate.temperature, or leave it out"
            )
