"""Makes the helpers in this directory (model_fixtures) importable from the tests of every room."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
