"""How deployments of a sweep decode: a token a step, or several that were drafted."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fastroof.acceptance import MTP, acceptance_length
from fastroof.sweep.spec_values import model_name, text

__all__ = ["NO_DRAFT", "Speculation"]

NO_DRAFT = "none"
"""Value of ``draft`` where drafts take no time."""


class Speculation(BaseModel):
    """Draft tokens that every request verifies in a step, see :class:`fastroof.SpeculativeDecoding`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_draft_tokens: int = Field(ge=1, description="tokens that are drafted a step, a whole number above 0")
    accepted: float | tuple[float, ...] = Field(
        description="mean tokens that a step says of a request, its own included, or a list of the "
        "acceptance rates of each position"
    )
    draft: str = Field(
        NO_DRAFT,
        description="what drafts: a model name or the path of a config.json file, 'mtp' for the model's own "
        "layer, or 'none' where it takes no time",
    )
    draft_tp: int | None = Field(
        None, ge=1, description="GPUs that a second model is split over, a whole number; default its target's"
    )
    draft_dtype: str = Field("auto", description="linear layers of a second model; default its checkpoint's")

    @field_validator("accepted", mode="before")
    @classmethod
    def _take_list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("draft", mode="before")
    @classmethod
    def _check_draft(cls, value: Any) -> str:
        name = text(value)
        if name not in (NO_DRAFT, MTP):
            model_name(name)
        return name

    @model_validator(mode="after")
    def _check_accepted(self) -> Speculation:
        acceptance_length(self.num_draft_tokens, self.accepted)
        return self

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a request says in a step."""
        return acceptance_length(self.num_draft_tokens, self.accepted)

    @property
    def draft_model(self) -> str | None:
        """Name or path of the second model, where there is one."""
        return None if self.draft in (NO_DRAFT, MTP) else self.draft
