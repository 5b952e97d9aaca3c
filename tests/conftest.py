"""Settings of the whole suite; must run before torch is imported."""

import os

# The models of the tests are tiny: a second thread saves nothing, and on a busy machine waiting for it costs a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
