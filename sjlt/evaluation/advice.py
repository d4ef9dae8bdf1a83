"""One sentence of advice, derived from the recall of all methods."""

from __future__ import annotations

from collections.abc import Sequence

from .results import SearchQuality

ENOUGH = 0.9  # recall that most applications accept
ENOUGH_TO_RERANK = 0.99  # recall among the candidates for re-ranking


def advice(methods: Sequence[SearchQuality], original_bytes: int, neighbours: int) -> str:
    """Recommend the smallest method whose search by cosine similarity finds enough of the nearest rows.

    If there is none, recommend the smallest method that keeps them among the candidates for re-ranking, or else the
    originals. Among methods whose sizes differ by less than 10 %, choose the one with the highest recall.
    """
    smaller = [method for method in methods if method.bytes < original_bytes]
    direct = [method for method in smaller if method.cosine >= ENOUGH]
    rerank = [method for method in smaller if method.cosine_shortlist >= ENOUGH_TO_RERANK]
    sketches = [method for method in smaller if method.is_sketch]
    if direct:
        best = _smallest(direct)
        kept = f"{best.name} keeps {_percent(best.cosine)} of the {neighbours} nearest in {best.bytes:,} bytes"
    elif rerank:
        best = _smallest(rerank)
        share = _percent(best.cosine_shortlist)
        kept = f"{best.name} keeps {share} of the {neighbours} nearest among {best.bytes:,}-byte candidates to re-rank"
    else:
        return "Keep the originals: nothing smaller keeps search intact."
    if best.is_sketch:
        return f"Project: {kept} instead of {original_bytes:,}."
    if not sketches:
        return f"Don't project: {kept}."
    rival = max(sketches, key=lambda method: (method.bytes <= 1.1 * best.bytes, method.cosine))
    return f"Don't project: {kept}; {rival.name} keeps {_percent(rival.cosine)} in {rival.bytes:,}."


def _smallest(methods: Sequence[SearchQuality]) -> SearchQuality:
    least = min(method.bytes for method in methods)
    return max((method for method in methods if method.bytes <= 1.1 * least), key=lambda method: method.cosine)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.1f} %"
