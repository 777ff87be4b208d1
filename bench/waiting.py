"""How torch's threads wait, for programs that time a model on the CPU: they import this first, before torch loads.

Threads that sleep at once have to be woken 121 times a step, and ones that spin for long while they wait for each other
collapse when another process runs.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
