"""The best of a search is compared once more on the GPU: the best of many noisy scores flatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warploom.runtime import LocalMeasurer, Timing, TimingSettings


def fastest(
    measurer: LocalMeasurer,
    original: bytes,
    leaders: Sequence[bytes],
    candidate_s: float,
    say: Callable[[str], None],
) -> tuple[int | None, float, Timing]:
    """(place of the fastest, its speed-up, the timing); None when none clears the A/A control.

    `candidate_s` is what a measurement of the search took, which loads, runs and times an image as
    each reload of this comparison does: what is told to be waited for is in proportion.
    """
    settings = TimingSettings()
    loads = settings.reloads * (len(leaders) + 2)  # the original and its copy, the control, too
    say(
        f"comparing the best {len(leaders)} with the original on the GPU, {settings.reloads} times "
        f"{settings.rounds} rounds: about {max(1.0, loads * candidate_s):.0f} s"
    )
    images = {f"leader {number}": image for number, image in enumerate(leaders)}
    timing = measurer.compare({"original": original, **images}, settings)
    name = max(images, key=lambda leader: timing.ratios[leader].median)
    ratio = timing.ratios[name]
    if ratio.median <= 1.0 or not ratio.clears(timing.control):
        return None, 1.0, timing
    return list(images).index(name), ratio.median, timing
