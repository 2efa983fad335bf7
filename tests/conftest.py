"""Before any test module is imported."""

import os

# Two workers of pytest and their ranks share the cores: threads of one would only wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
