"""How torch's threads wait. Programs that time a model on the CPU import this first, before torch loads.

Threads that go to sleep at once must be woken 121 times a step, and threads that spin long while waiting for one
another collapse when another process runs.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
