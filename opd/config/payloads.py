"""A payload's name in a pipeline."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

PAYLOADS = {
    "hidden_states": "opd.payloads.hidden_states:HiddenStates",
    "sampled_logprobs": "opd.payloads.sampled_logprobs:SampledLogprobs",
    "top_k": "opd.payloads.top_k:TopTokens",
    "aligned_states": "opd.payloads.aligned_states:AlignedStates",
    "text": "opd.payloads.text:WrittenAnswer",
    "none": "opd.payloads.none:Unscored",
}
"""Value of `teachers.payload` -> its class. Only the class in use is imported, when it is used."""
OWN_TOKENS = "aligned_states"
"""The payload of experts that read prompts and responses in tokens of their own."""
TEXT = "text"
"""The payload of experts that write answers and score nothing; also the name of their engine."""


def _check_payload(value: Any) -> Any:
    if value in list(PAYLOADS):  # a list, because a dictionary would raise for a value that cannot be hashed
        return value
    *most, last = map(repr, PAYLOADS)
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})


PayloadName = Annotated[
    str, BeforeValidator(_check_payload), WithJsonSchema({"enum": list(PAYLOADS), "type": "string"})
]
"""One of `PAYLOADS`."""
