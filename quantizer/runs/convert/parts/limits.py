"""The limits of a conversion of a model in parts: what a request may ask for, and how many tokens are written."""

from __future__ import annotations

from typing import Any

from quantizer.errors import ConfigError, TaskError
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.request import ConversionRequest

_TOKENS = 128
"""The most tokens that are written, unless the request says otherwise."""


def require_possible(asked: ConversionRequest, facts: ConversionInputs) -> None:
    """Raise if a request asks for something that models in parts cannot have."""
    if asked.max_drop is not None:
        raise ConfigError(
            [
                f"--max-drop {asked.max_drop:g}: task {facts.task} is of a model in several parts, for which nothing "
                "is put back to float; leave it and --tuning out, and give --evaluation to see the score"
            ]
        )


def most_tokens(asked: int | None, config: Any, option: str) -> int:
    """Return how many tokens are written for a row at most."""
    positions = [getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings")]
    most = next((one for one in positions if isinstance(one, int)), None)
    # Some are for the tokens that the decoder begins with.
    room = None if most is None else most - min(8, most // 2)
    if room is None or asked is None:
        return asked or min(_TOKENS, room or _TOKENS)
    if asked > room:
        raise TaskError(
            f"{option} {asked}: the decoder has {most} positions, the first of them for what it begins with; give "
            f"{room} or less"
        )
    return asked
