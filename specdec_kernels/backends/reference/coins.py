"""The random numbers of a verify step that has seeds."""

from __future__ import annotations

from ...ops.arguments import PURPOSES, NoiseKeysArguments, UniformSamplesArguments, VerifyArguments
from .noise_keys import noise_keys
from .uniform_samples import uniform_samples


def with_numbers(args: VerifyArguments, num: int) -> VerifyArguments:
    """The same arguments with the numbers themselves, so many a sequence."""
    seeds, steps, positions, step = args.seeds, args.steps, args.positions, args.step
    if seeds is None:
        return args
    args = args._replace(seeds=None, steps=None, positions=None)
    if positions is not None:
        keys = noise_keys(NoiseKeysArguments(seeds, positions, steps, step, PURPOSES["sample"]))
        return args._replace(noise_keys=keys)
    return args._replace(
        uniform_samples=uniform_samples(UniformSamplesArguments(seeds, steps, step, num, PURPOSES["accept"]))
    )
