"""One campaign is held to physics at a time: vLLM's, whose violations are listed by cause."""

from __future__ import annotations

import pytest

import fastroof


@pytest.fixture(scope="session")
def h100() -> fastroof.Tables:
    return fastroof.load_tables("h100", source="aiconfigurator-vllm-0.25.0")
