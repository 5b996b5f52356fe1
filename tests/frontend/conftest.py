"""The tokenizer of the small trained model, shared by the frontend tests."""

import pytest

from runtime.frontend.tokenizer import Tokenizer
from tests.frontend.resources import TINY


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer((TINY / "tokenizer.json").read_bytes(), (TINY / "tokenizer_config.json").read_bytes())
