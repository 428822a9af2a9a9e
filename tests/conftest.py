"""For every test: what it patched is undone after it."""

import pytest


@pytest.fixture(autouse=True)
def unpatched():
    yield
    from easy_context import remove_seq_parallel_monkey_patch

    remove_seq_parallel_monkey_patch()
