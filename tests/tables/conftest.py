"""Lookups are held to one campaign: vLLM's H100 tables, with all that they hold."""

from __future__ import annotations

import pytest

import fastroof


@pytest.fixture(scope="session")
def h100() -> fastroof.Tables:
    return fastroof.load_tables("h100", source="aiconfigurator-vllm-0.25.0")
