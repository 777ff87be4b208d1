"""Is a verifier lossless? Its exact output distribution, extracted through its own random numbers.

    from specdec_kernels.audit import audit

    print(audit(my_verify, signature="plain"))

Needs scipy (the package's extra "audit"). Nothing here uses the code that it may be asked to judge.
"""

from .report import Finding, Loop, Report, Row
from .run import audit
from .signatures import SIGNATURES

__all__ = ["SIGNATURES", "Finding", "Loop", "Report", "Row", "audit"]
