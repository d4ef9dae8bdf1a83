"""The laws as specified in sjlt/laws/README.md, implemented from its text alone, and its worked examples.

`reference.py` and its siblings are older references; this file shares no line with them or with the library.
"""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors" / "sketch_law_v1.json").read_text())
STACKED = json.loads((HERE / "vectors" / "stacked_sketches.json").read_text())
OTHER_VECTORS = json.loads((HERE / "vectors" / "dropout_and_iid_laws.json").read_text())
PAGE = (HERE.parent / "sjlt" / "laws" / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------- "Philox"


def rounds(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 // 2**32 ^ c1 ^ k0, p1 % 2**32, p0 // 2**32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def philox(seed, index, sub, tag):
    seed = seed % 2**64
    return rounds((index % 2**32, index // 2**32, sub, tag), (seed % 2**32, seed // 2**32))


def bits_of(words, width, place):
    """Lane `place` of `width` bits of the 128-bit integer formed by the words, w0 lowest."""
    number = words[0] + 2**32 * words[1] + 2**64 * words[2] + 2**96 * words[3]
    return number // 2 ** (width * place) % 2**width


# ------------------------------------------------------------------------------------- "The exact law"


def beta(x, a1, b1, a2, b2, p):
    x = (x * (a1 | 1) + b1) % 2**p
    x = x ^ (x >> math.ceil(p / 2))
    return (x * (a2 | 1) + b2) % 2**p


def largest_power(n):
    """The exponent of the largest power of two <= n."""
    return n.bit_length() - 1


def column(k, s, seed, j, tag_offset=0):
    """{quantity: value} of the worked example, including "rows" and "signs" of column j."""
    M = math.ceil(k / 128)
    p, q = largest_power(k // M // s), largest_power(M)
    c, i = j >> p, j % 2**p
    g, place = c >> q, c % 2**q
    w = philox(seed, g, 0, 3 + tag_offset)
    mu, theta_tile = beta(place, *w, q), ((w[1] >> 16) * M) >> 16
    m = (mu * M + theta_tile) >> q
    first, R = m * k // M, (m + 1) * k // M - m * k // M
    keys = [philox(seed, c, t // 4, 1 + tag_offset)[t % 4] for t in range(s)]
    sign_words = philox(seed, c, 0, 2 + tag_offset)
    slots, rows, signs = [], [], []
    for t, key in enumerate(keys):
        start, b = first + t * R // s, (t + 1) * R // s - t * R // s
        slots.append(beta(i, key, key >> 8, key >> 16, key >> 24, p))
        rows.append(start + ((slots[t] * b + ((((key >> 4) & 0xFFF) * b) >> 12)) >> p))
        e = t * 2**p + i
        signs.append(-1 if sign_words[e // 32] >> e % 32 & 1 else 1)
    return {
        "M, ⌊k/M⌋, p, q": (M, k // M, p, q),
        "c, i": (c, i),
        "g, place of c": (g, place),
        "Philox(g, 0, tag 3)": tuple(w),
        "μ, θ, m": (mu, theta_tile, m),
        "first row of tile m, R_m": (first, R),
        "w for t = 0 to 4": tuple(keys),
        "slots": tuple(slots),
        "rows": tuple(rows),
        "Philox(c, 0, tag 2)": tuple(sign_words),
        "signs": tuple(signs),
    }


@pytest.mark.parametrize("v", VECTORS["philox4x32_10"], ids=lambda v: f"{v['counter'][0]:x}")
def test_philox(v):
    assert rounds(v["counter"], v["key"]) == v["words"]


@pytest.mark.parametrize("v", VECTORS["sketch"], ids=lambda v: "-".join(str(x) for x in list(v.values())[:4]))
def test_exact_law(v):
    for c, (rows, signs) in enumerate(zip(v["rows"], v["signs"], strict=True)):
        found = column(v["n_components"], v["nnz"], v["seed"], v["first_column"] + c)
        assert (list(found["rows"]), list(found["signs"])) == (rows, signs)


def stacked_column(k, s, stacks, seed, j):
    """Rows and signs of column j, stack by stack."""
    rows, signs = [], []
    for t in range(stacks):
        stack = column(k // stacks, s // stacks, seed, j, 256 * t)
        rows += [t * k // stacks + row for row in stack["rows"]]
        signs += stack["signs"]
    return rows, signs


@pytest.mark.parametrize("v", STACKED["sketch"], ids=lambda v: "-".join(str(x) for x in list(v.values())[:5]))
def test_stacks(v):
    for c, expected in enumerate(zip(v["rows"], v["signs"], strict=True)):
        found = stacked_column(v["n_components"], v["nnz"], v["stacks"], v["seed"], v["first_column"] + c)
        assert found == expected


# ------------------------------------------------------------------------------------- "The iid law"


def iid_parameters(density):
    bits = 8 if density >= Fraction(1, 16) else 16
    return bits, math.floor(Fraction(density) * 2 ** (bits - 1) + Fraction(1, 2))


def iid_entry(density, seed, r, j):
    bits, T = iid_parameters(density)
    lanes = 128 // bits
    lane = bits_of(philox(seed, j, r // lanes, 4), bits, r % lanes)
    if lane % 2 ** (bits - 1) >= T:
        return 0
    return -1 if lane >= 2 ** (bits - 1) else 1


@pytest.mark.parametrize("v", OTHER_VECTORS["iid"], ids=lambda v: f"{v['density']:.3g}")
def test_iid_law(v):
    bits, T = iid_parameters(v["density"])
    assert T / 2 ** (bits - 1) == v["realised_density"]
    for c, entries in enumerate(v["entries"]):
        j = v["first_column"] + c
        assert [iid_entry(v["density"], v["seed"], r, j) for r in range(v["n_components"])] == entries


# ------------------------------------------------------------------------------------- "The dropout law"


def dropout_lane(seed, step, bits, e):
    lanes = 128 // bits
    return bits_of(philox(seed, e // lanes, step, 0), bits, e % lanes)


@pytest.mark.parametrize("v", OTHER_VECTORS["dropout"], ids=lambda v: "-".join(str(x) for x in list(v.values())[:4]))
def test_dropout_law(v):
    for i, lane in enumerate(v["lanes"]):
        assert dropout_lane(v["seed"], v["step"], v["bits"], v["first_index"] + i) == lane


# ------------------------------------------------------------------------------------- worked examples


def test_worked_example_of_the_exact_law():
    k, s, seed, j = 700, 5, 123456789012345, 5000
    assert f"k = {k}, s = {s}, seed {seed}, column j = {j}:" in PAGE
    assert f"| key | ({seed % 2**32}, {seed // 2**32}) |" in PAGE
    for name, value in column(k, s, seed, j).items():
        assert f"| {name} | {', '.join(map(str, value))} |" in PAGE


def test_worked_example_of_the_iid_law():
    entries = [iid_entry(1 / 3, 4, r, 0) for r in range(16)]
    assert f"    {', '.join(map(str, entries))}\n" in PAGE
    assert "bits = {}, T = {} of 128".format(*iid_parameters(1 / 3)) in PAGE


def test_worked_example_of_the_dropout_law():
    lanes = [dropout_lane(123, 0, 16, e) for e in range(8)]
    kept = [str(e) for e, lane in enumerate(lanes) if lane >= 2**15]
    assert f"    {', '.join(map(str, lanes))}\n" in PAGE
    assert f"keeps elements {', '.join(kept)}." in PAGE


# ------------------------------------------------------------------------------------- "Tables"


def test_worked_example_of_tables():
    seeds = []
    for t in range(3):
        w = philox(7, t, 0, 5)
        seeds.append(w[0] + 2**32 * w[1])
    assert f"    {', '.join(map(str, seeds))}\n" in PAGE
