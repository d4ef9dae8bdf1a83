"""Changes to the choice of kernels, for tests: its inputs, and clearing of cached choices."""

from contextlib import contextmanager
from functools import lru_cache

import pytest

from sjlt.backends.triton import device, exact, iid, prepared
from sjlt.kernels.config import (
    codes,
    dense_matrix,
    lane_sums,
    scattered_sums,
    staged_adjoint,
    staged_gather,
    warp_tiles,
)
from sjlt.kernels.config.exact import choose
from sjlt.kernels.config.product import Device, Product

H200 = Device(132, 232448, programmatic_launch=True)
HOPPER = H200._replace(hopper=True, asynchronous_copies=True)
A100 = HOPPER._replace(shared_memory=163 << 10, multiprocessors=108, hopper=False)
SMALL_DEVICE = A100._replace(shared_memory=99 << 10, multiprocessors=128)
EMULATED = HOPPER._replace(multiprocessors=2, hopper=False, programmatic_launch=False, nvidia=False, interpreted=True)

# Settings with which adjoints of all sizes use `adjoint_staged` where it can run them.
STAGED_ADJOINTS = {f"staged_adjoint.{name}": (1, 1 << 60) for name in ("OTHERS", "OTHERS_POWER_OF_TWO", "OTHERS_FP64")}
STAGED_ADJOINTS |= {"gathers.MIN_SMALL": 1 << 60}  # no small gathers

# Settings with which `one_tile` only multiplies stored entries, and leaves small and narrow products to other kernels.
NONE_GENERATED = {f"one_tile.{name}": () for name in ("MAX_SMALL", "MAX_SMALL_ADJOINT", "MAX_SMALL_ADJOINT_FEW")}
NONE_GENERATED |= {"one_tile.MAX_NARROW_SUMS": 0}

# Settings with which few vectors in 16 bits use the kernels that do without `warp_tiles`.
NO_WARP_TILES = {"warp_tiles.MAX_NNZ": 0}

# Settings with which `few_vectors` is not chosen for S A because of a small nnz, except nnz 1.
NO_FEW_READS = {"gathers.MAX_GATHERED_BYTES": 0, "gathers.NARROW_VECTORS": 0}

# Settings with which 16-bit products use a dense matrix wherever torch can multiply by it.
DENSE_MATRICES = {"dense_matrix.eligible": dense_matrix.is_possible}


def exact_product(
    n=1 << 20, d=768, k=256, nnz=4, offset=0, x_strides=None, y_strides=None, dtype="float32", precision="highest",
    adjoint=False, plain=True, device=H200, stacks=1, data_aligned=True,
):  # fmt: skip
    """A product of the exact law; contiguous rows unless strides are given."""
    x_strides, y_strides = x_strides or (d, 1), y_strides or (k, 1)
    return Product(
        adjoint, n, d, k, nnz, offset, x_strides, y_strides, dtype, precision, plain, device, stacks, data_aligned
    )  # fmt: skip


def chosen(**product):
    """The launch chosen for a product on an H200."""
    return choose(exact_product(device=HOPPER, **product))


def iid_product(n, d, k, dtype, precision="highest", x_strides=None, offset=0, device=H200):
    """A product X Sᵀ of the iid law."""
    return Product(False, n, d, k, 0, offset, x_strides or (d, 1), (k, 1), dtype, precision, True, device)


def forget_choices():
    """Make the backends choose again for products they have seen."""
    for cached in (exact.make_plan, exact._shared_plan, iid.make_plan, iid._shared_plan):
        cached.cache_clear()
    codes.split_of.cache_clear()
    lane_sums._fastest.cache_clear()
    scattered_sums._choose.cache_clear()
    scattered_sums._fastest.cache_clear()
    staged_gather._launch.cache_clear()
    staged_adjoint._launch.cache_clear()
    warp_tiles._launch.cache_clear()
    prepared._prepared.clear()


@contextmanager
def changed_choices(settings):
    """Context in which constants of `sjlt.kernels.config`, named "module.NAME", have the given values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(f"sjlt.kernels.config.{name}", value)
        forget_choices()
        yield
    forget_choices()


def in_three_passes():
    """Settings with which codes are written and used in three passes."""
    split = lru_cache(lambda product, programs: codes._split_passes(product, programs, 3))
    modules = ("codes", "hopper_codes", "ampere_codes")
    return {f"{module}.split_of": split for module in modules} | {"codes.MAX_SPLITS": 4}


def fixture_of_one_launch(launch):
    """A fixture with which all products of the exact law are launched by ``launch(product)``."""

    @pytest.fixture
    def always(monkeypatch):
        monkeypatch.setattr(exact, "choose", launch)
        forget_choices()
        yield
        forget_choices()

    return always


def all_tensors_on(monkeypatch, described):
    """For the choice of kernels, all tensors are on the described device."""
    monkeypatch.setattr(device, "describe", lambda _: described)
    monkeypatch.setattr(prepared, "_prepared", {})


def with_parts(names, cases, default):
    """Parametrize over cases x the fixture `parts`. Cases not listed in `default` are marked `exhaustive`."""
    every = [(*case, parts) for case in cases for parts in ("pair", "triple")]
    assert all(any(str(case) == str(other) for other in every) for case in default)  # strings, as nan != nan
    known = {str(case) for case in default}
    params = [pytest.param(*c, marks=() if str(c) in known else pytest.mark.exhaustive) for c in every]
    return pytest.mark.parametrize(f"{names}, parts", params, indirect=["parts"])
