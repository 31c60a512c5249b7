"""Tables nested in a spec of deployments: limits, layouts of a replica, and speculative decoding."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fastroof.acceptance import MTP, check_accepted
from fastroof.sweep.spec import MAX_GPUS, MODEL_NAMES, model_name, text

Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0, le=MAX_GPUS)]


class Constraints(BaseModel):
    """Limits of a deployment; a missing key means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ttft_ms: Limit | None = Field(default=None, description="a number of ms above 0: maximum mean TTFT")
    tpot_ms: Limit | None = Field(default=None, description="a number of ms above 0: maximum mean TPOT")
    itl_ms: Limit | None = Field(
        default=None, description="a number of ms above 0: maximum mean time between two tokens"
    )
    request_latency_ms: Limit | None = Field(
        default=None, description="a number of ms above 0: maximum mean request latency"
    )
    kv_share: Limit | None = Field(
        default=None, description="a number above 0: maximum share of the KV cache in use"
    )
    total_gpus: int | None = Field(default=None, gt=0, description="a whole number above 0: maximum GPUs")


class SplitChoice(BaseModel):
    """One way to split a model over the GPUs of a replica or worker; missing sizes are 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tp: Size = Field(1, description="a whole number above 0: GPUs that share each layer")
    pp: Size = Field(1, description="a whole number above 0: pipeline stages")
    dp: Size = Field(1, description="a whole number above 0: ranks of attention data parallelism")
    ep: Size = Field(1, description="a whole number above 0: expert-parallel groups")


NO_DRAFT = "none"
"""Value of ``draft`` for drafts that take no time."""


class Speculation(BaseModel):
    """Speculative decoding of every request, see :class:`fastroof.SpeculativeDecoding`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_draft_tokens: int = Field(ge=1, description="draft tokens per step, a whole number above 0")
    accepted: float | tuple[float, ...] | Literal["auto"] = Field(
        description="mean tokens per request and step, including the one without a draft, a list of the "
        "acceptance rates of each position, or 'auto' for those measured for the model"
    )
    draft: str = Field(
        NO_DRAFT,
        description="drafter: a model name or the path of a config.json file, 'mtp' for the model's own "
        "layer, or 'none' for drafts that take no time",
    )
    draft_tp: int | None = Field(
        None, ge=1, description="tensor-parallel size of a draft model, a whole number; default: its target's"
    )
    draft_dtype: str = Field(
        "auto", description="dtype of a draft model's linear layers; default: its checkpoint's"
    )

    @field_validator("accepted", mode="before")
    @classmethod
    def _take_list(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("draft", mode="before")
    @classmethod
    def _check_draft(cls, value: Any) -> str:
        name = text(value, MODEL_NAMES)
        if name not in (NO_DRAFT, MTP):
            model_name(name)
        return name

    @model_validator(mode="after")
    def _check_accepted(self) -> Speculation:
        check_accepted(self.num_draft_tokens, self.accepted)
        return self

    @property
    def drafter(self) -> str | None:
        """Return the draft as :class:`fastroof.SpeculativeDecoding` takes it, a model by its name."""
        return None if self.draft == NO_DRAFT else self.draft

    @property
    def draft_model(self) -> str | None:
        """Return the name or path of the draft model, if there is one."""
        return None if self.draft in (NO_DRAFT, MTP) else self.draft
