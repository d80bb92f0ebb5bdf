"""Makes the helpers in this directory (model_fixtures) importable from the tests of every room."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("contract_openai")
