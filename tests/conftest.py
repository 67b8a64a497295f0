def pytest_addoption(parser):
    parser.addoption("--inductor", action="store_true", help="compile the loss of every learner to kernels")


def pytest_collectstart(collector):
    """Load the fixtures where tests are collected. The process that only hands them to others need not import torch."""
    collector.config.pluginmanager.import_plugin("support.shared_fixtures")
