from __future__ import annotations

import sys

from _specdec import main

sys.exit(main())
