"""The componentwise error bound that `config.accuracy` states for a launch, on inputs that try to break it."""

import numpy as np
import pytest
import torch
from helpers import kernels
from helpers.adversarial import DATA, U, check_bound
from helpers.cases import exhaustive_except
from helpers.choices import (
    DENSE_MATRICES,
    HOPPER,
    NO_FEW_READS,
    NONE_GENERATED,
    STAGED_ADJOINTS,
    all_tensors_on,
    changed_choices,
)
from helpers.kernels import FLOATS

from sjlt import Sketch
from sjlt.backends.triton import device, exact, iid
from sjlt.kernels.config.accuracy import error_bound
from sjlt.kernels.config.codes import Codes
from sjlt.kernels.config.dense_matrix import DenseMatrix
from sjlt.kernels.config.exact import FewVectors, RowGather, TensorCore
from sjlt.kernels.config.hopper import Hopper
from sjlt.kernels.config.iid import Iid, IidHopper
from sjlt.kernels.config.lane_sums import LaneSums
from sjlt.kernels.config.one_tile import OneTile
from sjlt.kernels.config.scattered_sums import ScatteredSums
from sjlt.kernels.config.staged_adjoint import StagedAdjoint
from sjlt.kernels.config.warp_tiles import WarpTiles

pytestmark = pytest.mark.filterwarnings(  # NumPy's, when an fp16 sum overflows in the interpreter
    "ignore:overflow encountered in (cast|multiply):RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
SPLIT = {"exact.MIN_SPLIT_ELEMENTS": 0}
ONE_SPLIT = {"exact.SCRATCH_BYTES": 0, "iid.SCRATCH_BYTES": 0}
SHORT_SUMS = {"exact.MAX_GATHERED_GROUPS": 20}
ONE_TILE = {"one_tile.MIN_ELEMENTS": 0, "one_tile.MIN_VECTORS": 1} | NONE_GENERATED
IN_REGISTERS = {"scattered_rules.MIN_BYTES": 1 << 40}
NOT_STAGED = {"staged_adjoint.MIN_VECTORS": 1 << 60}
NO_CODES = {"hopper_codes.MIN_BYTES": 1 << 60}
# Only few rows use sums in shared memory.
FEW_ROWS = {"scattered_rules.MIN_COLUMNS": 1 << 40, "scattered_rules.MAX_SMALL_BYTES": 0}
NO_SMALL_GATHERS = {"gathers.MIN_SMALL": 1 << 60}
PAIRS = {"arithmetic.MIN_PAIR_ELEMENTS": 0}
LARGE = {"hopper.MIN_ELEMENTS": 0, "hopper.MIN_VECTORS": 0, "hopper.MIN_UTILIZATION": {2: 0, 4: 0}}
LARGE |= {"hopper.MIN_PRODUCTS": 0, "iid.MIN_PRODUCTS": 0}


class Case:
    """A product, and the kernel expected to run it."""

    def __init__(self, launch, S, n, dtype="float32", adjoint=False, columns=False, settings=None, mode=None):
        self.launch, self.S, self.n, self.dtype, self.adjoint, self.columns = launch, S, n, dtype, adjoint, columns
        self.settings, self.mode = settings or {}, mode

    def data(self):
        """Data vectors, cycling through all kinds of data, of shape (n, length of a vector)."""
        rng = np.random.default_rng(0)
        S = Transposed(self.S) if self.adjoint else self.S
        kinds = [kind(S, rng) for kind in DATA.values()]
        x = np.resize(np.array(kinds), (self.n, S.n_features))
        return torch.from_numpy(np.clip(x, -6e4, 6e4)).to(FLOATS[self.dtype])

    def tensors(self, x):
        """Data x, in the case's order, and an output for it."""
        out_dtype = torch.float64 if self.dtype == "float64" else torch.float32  # the dtype of the sums themselves
        if self.launch in (Hopper, IidHopper, DenseMatrix):
            out_dtype = x.dtype
        height = self.S.n_features if self.adjoint else self.S.n_components
        out = torch.full((self.n, height), torch.nan, dtype=out_dtype, device=x.device)
        return [t.t().contiguous().t() if self.columns else t for t in (x, out)]

    def choose(self, x, out):
        """(product, launch) of data x; fail if another kernel is chosen than the case expects."""
        law = exact if self.S.nnz else iid
        rows, of_components = (out, x) if self.adjoint and self.S.nnz else (x, out)
        product = law.describe(self.S.spec, rows, of_components, False, self.adjoint)
        chosen = law.make_plan(product).chosen
        assert type(chosen) is self.launch, chosen
        assert self.mode is None or chosen.mode == self.mode, chosen
        return product, chosen

    def run(self, device):
        """Run the product and return (data, result, error bound, launch)."""
        x, out = self.tensors(self.data().to(device))
        with changed_choices(self.settings):
            product, chosen = self.choose(x, out)
            (kernels.adjoint if self.adjoint else kernels.project)(self.S, x, out, False)
        return x.cpu().double().numpy(), out, error_bound(product, chosen), chosen

    def check(self, device):
        """Return the largest error over all kinds of data in units of the bound, the bound's c, and the launch."""
        S, (x, out, (c, floor), chosen) = self.S, self.run(device)
        entries = S.to_scipy("csr")
        entries = entries.T.tocsr() if self.adjoint else entries
        scale = abs(entries.data[0])
        rounding = 0 if out.element_size() > 2 else torch.finfo(out.dtype).eps / 2 / U[self.dtype]
        result = out.cpu().double().numpy()
        rows = range(min(self.n, len(DATA)))
        worst = [check_bound(entries, scale, x[i], result[i], c + rounding, U[self.dtype], floor) for i in rows]
        return max(worst), c, chosen


class Transposed:
    """The transpose of a sketch, as far as generating data for it requires."""

    def __init__(self, S):
        self.S, self.n_features, self.n_components = S, S.n_components, S.n_features

    def to_scipy(self, format):
        return self.S.to_scipy().T.asformat(format)


LONG = Sketch(2400, 128, nnz=4, seed=695)[:, 100:2390]
PORTABLE = {
    "tensor cores, pairs": Case(TensorCore, LONG[:, :600], 16, settings=PAIRS, mode=4),
    "tensor cores, splits of pairs": Case(TensorCore, LONG, 20, settings=PAIRS | SPLIT, mode=4),
    "tensor cores, splits of triples": Case(TensorCore, LONG, 20, settings=SPLIT, mode=3),
    "tensor cores, bf16": Case(TensorCore, LONG, 20, "bfloat16"),
    "tensor cores, fp16": Case(TensorCore, LONG, 20, "float16"),
    "tensor cores, short chunks": Case(
        TensorCore, Sketch(1000, 60, nnz=8), 20, settings=PAIRS | NONE_GENERATED, mode=4
    ),
    "tensor cores, adjoint": Case(TensorCore, Sketch(600, 256, nnz=8), 20, adjoint=True),
    "one tile, pairs": Case(OneTile, Sketch(2400, 100, nnz=4), 20, settings=PAIRS | ONE_TILE, mode=4),
    "one tile, triples": Case(OneTile, Sketch(2400, 20, nnz=3)[:, 5:], 20, settings=ONE_TILE, mode=3),
    "one tile, bf16": Case(OneTile, Sketch(2400, 100, nnz=4), 20, "bfloat16", settings=ONE_TILE),
    "one tile, generated": Case(OneTile, Sketch(2400, 100, nnz=4)[:, 5:], 20, mode=3),
    "one tile, generated, bf16": Case(OneTile, Sketch(2400, 20, nnz=3), 20, "bfloat16"),
    "one tile, adjoint": Case(OneTile, Sketch(600, 100, nnz=8), 20, adjoint=True, settings=ONE_TILE | NOT_STAGED),
    "row_gather": Case(RowGather, LONG[:, :600], 20, columns=True, settings=SPLIT),
    "row_gather, long sums": Case(
        RowGather, Sketch(300, 4, nnz=2), 20, columns=True, settings=SHORT_SUMS | NONE_GENERATED | NO_FEW_READS
    ),
    "row_gather, adjoint": Case(RowGather, Sketch(640, 256, nnz=4), 20, adjoint=True, columns=True),
    "dense matrix": Case(DenseMatrix, LONG[:, :2048], 20, "bfloat16", settings=DENSE_MATRICES),
    "dense matrix, adjoint": Case(
        DenseMatrix, Sketch(600, 256, nnz=8), 20, "bfloat16", adjoint=True, settings=DENSE_MATRICES
    ),
    "few_vectors": Case(FewVectors, LONG, 8),
    "few_vectors, one long sum": Case(FewVectors, Sketch(2**15, 16, nnz=1, seed=695), 4, settings=ONE_SPLIT),
    "few_vectors, fp64": Case(FewVectors, LONG, 8, "float64"),
    "few_vectors, one long sum in fp64": Case(
        FewVectors, Sketch(2**15, 16, nnz=1), 4, "float64", settings=ONE_SPLIT | IN_REGISTERS
    ),
    "few_vectors, fp64, columns": Case(FewVectors, Sketch(800, 100, nnz=3), 10, "float64", columns=True),
    "few_vectors, adjoint": Case(FewVectors, Sketch(500, 255, nnz=85), 8, adjoint=True),
    "independent entries": Case(Iid, Sketch(3000, 60, density=0.3), 20, settings=PAIRS, mode=4),
    "independent entries, triples": Case(Iid, Sketch(700, 60, density=1), 20, mode=3),
    "independent entries, bf16": Case(Iid, Sketch(3000, 60, density=0.01), 20, "bfloat16"),
    "independent entries, fp64": Case(Iid, Sketch(3000, 20, density=1), 8, "float64", settings={"iid.FP64_TERMS": 32}),
    "independent entries, adjoint": Case(Iid, Sketch(300, 500, density=0.3), 20, adjoint=True),
}
DEFAULT = ["tensor cores, pairs", "row_gather", "few_vectors, fp64", "independent entries, triples"]


@pytest.mark.parametrize("name", exhaustive_except(DEFAULT, list(PORTABLE)))
def test_portable_kernels(name, kernels_on):
    PORTABLE[name].check(kernels_on)


WIDE = Sketch(2**14, 256, nnz=4, seed=695)
ON_CUDA = {
    "tensor cores": Case(TensorCore, WIDE[:, 3:], 40, settings=PAIRS | FEW_ROWS, mode=4),
    "one tile": Case(OneTile, Sketch(2**14, 100, nnz=4)[:, 3:], 70, settings=PAIRS | NO_CODES | FEW_ROWS, mode=4),
    "one tile, adjoint": Case(OneTile, Sketch(2**14, 60, nnz=4), 140, adjoint=True, settings=NOT_STAGED),
    "one tile, bf16": Case(OneTile, Sketch(2**18, 60, nnz=4), 70, "bfloat16", settings=NO_CODES),
    "tensor cores, many groups": Case(TensorCore, Sketch(2**18, 128, nnz=4), 40, settings=FEW_ROWS, mode=4),
    "tensor cores, bf16": Case(TensorCore, WIDE[:, 3:], 40, "bfloat16", settings=FEW_ROWS),
    "row_gather": Case(RowGather, WIDE, 128, columns=True, settings=NO_SMALL_GATHERS | NO_CODES),
    "row_gather, many groups": Case(RowGather, Sketch(2**18, 128, nnz=4), 64, columns=True),
    "few_vectors": Case(FewVectors, Sketch(2**20, 16, nnz=4), 8, settings=IN_REGISTERS),
    "few_vectors, nnz 1": Case(FewVectors, Sketch(2**22, 16, nnz=1, seed=695), 8, settings=IN_REGISTERS),
    "few_vectors, fp64": Case(FewVectors, Sketch(2**20, 16, nnz=1), 8, "float64", settings=IN_REGISTERS),
    "warp tiles": Case(WarpTiles, Sketch(2**20, 300, nnz=8), 16, "bfloat16"),
    "lane sums": Case(LaneSums, Sketch(2**20, 16, nnz=4), 8),
    "lane sums, nnz 1": Case(LaneSums, Sketch(2**22, 16, nnz=1, seed=695), 8),
    "lane sums, bf16": Case(LaneSums, Sketch(2**22, 50, nnz=4), 2, "bfloat16"),
    "scattered sums": Case(ScatteredSums, Sketch(2**20, 300, nnz=4), 8),
    "scattered sums, nnz 1": Case(ScatteredSums, Sketch(2**22, 300, nnz=1, seed=695), 8),
    "scattered sums, fp64": Case(ScatteredSums, Sketch(2**20, 300, nnz=3), 8, "float64"),
    "few_vectors, fp64, columns": Case(FewVectors, Sketch(2**13, 100, nnz=3), 40, "float64", columns=True),
    "staged adjoint": Case(StagedAdjoint, Sketch(2000, 300, nnz=8), 300, adjoint=True, settings=STAGED_ADJOINTS),
    "staged adjoint, bf16": Case(
        StagedAdjoint, Sketch(2000, 300, nnz=5), 300, "bfloat16", adjoint=True, settings=STAGED_ADJOINTS
    ),
    "staged adjoint, fp64": Case(
        StagedAdjoint, Sketch(2000, 300, nnz=5), 300, "float64", adjoint=True, columns=True, settings=STAGED_ADJOINTS
    ),
    "independent entries": Case(Iid, Sketch(2**16, 60, density=0.3), 70, mode=4),
    "independent entries, one long sum": Case(Iid, Sketch(2**16, 60, density=0.3), 70, settings=ONE_SPLIT, mode=4),
    "independent entries, fp64": Case(Iid, Sketch(2**16, 20, density=1), 70, "float64", settings=ONE_SPLIT),
    "independent entries, bf16": Case(Iid, Sketch(2**16, 60, density=0.3), 70, "bfloat16", settings=ONE_SPLIT),
}
ON_HOPPER = {
    "fp32": Case(Hopper, WIDE, 512, settings=LARGE),
    "fp32, nnz 8": Case(Hopper, Sketch(2**14, 256, nnz=8), 512, settings=LARGE),
    "fp32, splits": Case(Hopper, Sketch(2**16, 128, nnz=4), 128, settings=LARGE | FEW_ROWS),
    "bf16": Case(Hopper, WIDE, 512, "bfloat16", settings=LARGE),
    "bf16, splits": Case(Hopper, Sketch(2**17, 128, nnz=4), 128, "bfloat16", settings=LARGE),
    "columns": Case(Hopper, Sketch(2**14, 256, nnz=8), 512, columns=True, settings=LARGE),
    "adjoint": Case(Hopper, Sketch(2**14, 256, nnz=4), 512, adjoint=True, settings=LARGE),
    "codes": Case(Codes, Sketch(2**14, 300, nnz=3), 512),
    "codes, short chunks": Case(Codes, Sketch(2**14, 64, nnz=16), 512),
    "codes, odd columns": Case(Codes, Sketch(2**14, 300, nnz=3)[:, 5:-2], 512, settings=FEW_ROWS),
    "codes, splits": Case(Codes, Sketch(2**17, 100, nnz=2), 70, settings=FEW_ROWS),
    "codes, bf16": Case(Codes, Sketch(2**14, 300, nnz=3), 512, "bfloat16"),
    "codes, unaligned rows": Case(Codes, Sketch(2**14 + 1, 300, nnz=3), 512, "bfloat16", settings=FEW_ROWS),
    "independent entries": Case(IidHopper, Sketch(4096, 300, density=0.3), 512, "bfloat16", settings=LARGE),
}


EVERYWHERE = [(name, case) for cases in (PORTABLE, ON_CUDA, ON_HOPPER) for name, case in cases.items()]


@pytest.mark.parametrize(("name", "case"), EVERYWHERE, ids=[name for name, _ in EVERYWHERE])
def test_cases_run_their_kernels_on_hopper(monkeypatch, name, case):
    all_tensors_on(monkeypatch, HOPPER)
    length = case.S.n_components if case.adjoint else case.S.n_features
    with changed_choices(case.settings):
        case.choose(*case.tensors(torch.empty(case.n, length, dtype=FLOATS[case.dtype])))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
def test_on_cuda(name):
    ON_CUDA[name].check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOPPER)
def test_on_hopper(name):
    if not device.describe(torch.device("cuda", 0)).hopper:
        pytest.skip("needs compute capability 9")
    ON_HOPPER[name].check("cuda")
