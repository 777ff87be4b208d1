"""Tools that prove a backend right: float64 distributions, independent random numbers, and the exact distribution that
a verifier produces.

The uniforms of the ratio rules are inputs, so a verifier is a piecewise constant function of them. `exact_law` finds
its pieces on the lattice of multiples of 2**-24, and so computes the distribution of the emitted tokens without
sampling. Nothing here calls the code it judges: the distributions are numpy in float64, and
Philox is written anew.
"""

from .exact import Pieces, exact_law, joint_of, pieces, target_joint, total_variation
from .laws import LAW_EXAMPLES, Float64, Int64, float64_gumbel, float64_law, float64_target_law, philox4x32, words32
from .problems import LATTICE, ChainProblem, TreeProblem, Verify

__all__ = [
    "LATTICE",
    "LAW_EXAMPLES",
    "ChainProblem",
    "Float64",
    "Int64",
    "Pieces",
    "TreeProblem",
    "Verify",
    "exact_law",
    "float64_gumbel",
    "float64_law",
    "float64_target_law",
    "joint_of",
    "philox4x32",
    "pieces",
    "target_joint",
    "total_variation",
    "words32",
]
