"""Exports: faiss, sentence-transformers and ONNX Runtime compute the sketch's result without needing sjlt."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import sjlt

pytestmark = pytest.mark.integrations

D, K = 96, 24
LAWS = [{"nnz": 4}, {"density": 0.25}, {"nnz": 1, "seed": 2**63 + 5}]


def vectors(n=200, d=D, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(n, d)).astype(dtype)


def run_without_sjlt(code, *arguments):
    """Run a program that cannot import sjlt."""
    guard = "import sys\nsys.modules['sjlt'] = None\n"
    result = subprocess.run([sys.executable, "-c", guard + code, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------------------- faiss


@pytest.mark.parametrize("law", LAWS)
def test_faiss_applies_the_sketch(law):
    pytest.importorskip("faiss")
    import sjlt.faiss

    S, x = sjlt.Sketch(D, K, **law), vectors()
    transform = sjlt.faiss.transform(S)
    assert (transform.d_in, transform.d_out, transform.is_trained) == (D, K, True)
    assert np.allclose(transform.apply(x), S.project(x), rtol=1e-5, atol=1e-5)


def test_faiss_searches_saves_and_loads(tmp_path):
    faiss = pytest.importorskip("faiss")
    import sjlt.faiss

    S, x = sjlt.Sketch(D, K, seed=3), vectors()
    index = faiss.IndexPreTransform(sjlt.faiss.transform(S), faiss.IndexFlatL2(K))
    index.add(x)
    _, found = index.search(x[:20], 5)
    y = S.project(x)
    distances = ((y[:20, None] - y[None]) ** 2).sum(axis=-1)
    assert np.array_equal(found, np.argsort(distances, axis=1)[:, :5])
    faiss.write_index(index, str(tmp_path / "index"))
    np.savez(tmp_path / "data.npz", x=x, found=found)
    run_without_sjlt(
        "import faiss, numpy as np\n"
        "data = np.load(sys.argv[2])\n"
        "found = faiss.read_index(sys.argv[1]).search(data['x'][:20], 5)[1]\n"
        "assert np.array_equal(found, data['found'])",
        tmp_path / "index",
        tmp_path / "data.npz",
    )


def test_faiss_refuses_sizes_beyond_int():
    pytest.importorskip("faiss")
    import sjlt.faiss

    with pytest.raises(ValueError, match="at most 2147483647 dimensions, got n_features = 2147483648"):
        sjlt.faiss.transform(sjlt.Sketch(2**31, 8))


# ------------------------------------------------------------------------------------- sentence-transformers


def static_model():
    """A sentence-transformers model with random word vectors."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[UNK]", "sparse", "random", "projection", "keeps", "distances", "well"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    embedding = StaticEmbedding(tokenizer, embedding_weights=vectors(len(words)))
    return SentenceTransformer(modules=[embedding], device="cpu")


SENTENCES = ["sparse random projection", "keeps distances well", "random", "unknown words"]


@pytest.mark.parametrize("law", LAWS)
def test_sentence_transformers_encodes_saves_and_loads(tmp_path, law):
    pytest.importorskip("sentence_transformers")
    import sjlt.sentence_transformers

    S, model = sjlt.Sketch(D, K, **law), static_model()
    before = model.encode(SENTENCES)
    model.append(sjlt.sentence_transformers.dense(S))
    after = model.encode(SENTENCES)
    assert after.shape == (4, K)
    assert np.allclose(after, S.project(before), rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in model[1].parameters())
    model.save(str(tmp_path / "model"))
    np.savez(tmp_path / "data.npz", after=after)
    run_without_sjlt(
        "import numpy as np\n"
        "from sentence_transformers import SentenceTransformer\n"
        "model = SentenceTransformer(sys.argv[1], device='cpu')\n"
        f"assert np.allclose(model.encode({SENTENCES!r}), np.load(sys.argv[2])['after'], rtol=1e-5, atol=1e-6)",
        tmp_path / "model",
        tmp_path / "data.npz",
    )


# ------------------------------------------------------------------------------------- ONNX


def exported(model, x, path):
    pytest.importorskip("onnxscript")
    import sjlt.onnx

    rows = torch.export.Dim("rows")
    torch.onnx.export(
        model.eval(), (x,), str(path), dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=({0: rows},),
        custom_translation_table=sjlt.onnx.translations(),
    )  # fmt: skip
    import onnx

    graph = onnx.load(str(path))
    onnx.checker.check_model(graph, full_check=True)
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    return graph


def run_onnx(path, x):
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})[0]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("adjoint", [False, True])
def test_onnx_layer(tmp_path, dtype, adjoint):
    layer = sjlt.nn.SparseProjection(D, K, nnz=3, seed=7)
    layer = layer.T if adjoint else layer
    x = torch.from_numpy(vectors(5, K if adjoint else D)).to(dtype)
    graph = exported(layer, x[:2], tmp_path / "layer.onnx")
    assert [node.op_type for node in graph.graph.node] == ["MatMul"]
    tolerance = {torch.float16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert np.allclose(run_onnx(tmp_path / "layer.onnx", x), layer(x).numpy(), rtol=tolerance, atol=tolerance)


class Model(torch.nn.Module):
    """A model that ends in a projection and uses products with an independent-entries sketch inside."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(10, D)
        self.inner = sjlt.Sketch(D, D, density=0.5, seed=1)
        self.last = sjlt.nn.SparseProjection(D, K, seed=2)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h @ self.inner.T + (self.inner @ h.mT).mT)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_onnx_model_ending_in_a_projection(tmp_path):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(7, 10)
    exported(model, x[:3], tmp_path / "model.onnx")
    assert np.allclose(run_onnx(tmp_path / "model.onnx", x), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_onnx_refuses_too_large_matrices(tmp_path):
    layer = sjlt.nn.SparseProjection(2**28, 4, seed=0)
    with pytest.raises(Exception, match=r"\(4, 268435456\) has more than 536870912 entries"):
        exported(layer, torch.ones(2, 2**28, device="meta"), tmp_path / "layer.onnx")


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("faiss", "sjlt.faiss.transform(S)", "faiss"),
        ("sentence_transformers", "sjlt.sentence_transformers.dense(S)", "sentence-transformers"),
        ("onnx", "sjlt.onnx.translations()", "onnx"),
    ],
)
def test_missing_package_names_the_extra(module, call, extra):
    hidden = "onnxscript" if module == "onnx" else module
    code = (
        f"import sys, sjlt, sjlt.{module}\nsys.modules[{hidden!r}] = None\nS = sjlt.Sketch(8, 4)\n"
        f"try:\n    {call}\nexcept ImportError as e:\n    print(e)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'sjlt-triton[{extra}]'" in output.stdout, output.stderr
