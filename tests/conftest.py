import importlib.util

import pytest


def pytest_addoption(parser):
    parser.addoption("--inductor", action="store_true", help="compile the loss of every learner to kernels")


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
