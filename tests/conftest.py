import importlib.util

import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked as slow too")
    parser.addoption("--inductor", action="store_true", help="compile the loss of every learner to kernels")


def pytest_collection_modifyitems(config, items):
    """Leave out the slow tests, unless they are asked for: by ``--slow``, a name (``file::test``), or ``-m``."""
    named = any("::" in argument for argument in config.args)
    if config.option.slow or config.option.markexpr or named:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collectstart(collector):
    """Load the fixtures where tests are collected. The process that only hands them to others need not import torch."""
    collector.config.pluginmanager.import_plugin("support.shared_fixtures")


def _needs_timm(outcome):
    """Skip a test that failed because timm, an extra, is not installed: of a method that tunes its transformers."""
    error = outcome.excinfo and outcome.excinfo[1]
    if error and "timm is not installed" in str(error) and importlib.util.find_spec("timm") is None:
        outcome.force_exception(pytest.skip.Exception("needs timm"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item):
    _needs_timm((yield))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    _needs_timm((yield))
