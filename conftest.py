"""Which tests a plain `pytest` runs, and in how many processes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow, too")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return 0 where starting workers takes longer than the tests, or would disturb what they time."""
    option = config.option
    paths = [config.invocation_params.dir / name.partition("::")[0] for name in config.args]
    few = bool(option.keyword) or option.collectonly or any(path.suffix == ".py" for path in paths)
    timed = config.rootpath / "benchmarks" in paths and not option.benchmark_disable
    return 0 if few or timed else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, unless --all or -m is given or a test is named."""
    if config.option.all or config.option.markexpr or any("::" in name for name in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
