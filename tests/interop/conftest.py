"""Keeps the code of exported directories, which the library copies before it runs it, out of the user's cache."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def modules_cache(tmp_path_factory):
    import transformers.dynamic_module_utils as utils

    utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
