"""Engines that produce Arrow data run `sjlt.arrow.Projector` unchanged, with the results of `Sketch.project`."""

import shutil

import numpy as np
import pytest

import sjlt
from sjlt.arrow import Projector

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

N, D, K = 500, 64, 16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A parquet file in several row groups, and its vectors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D).cast(pa.list_(pa.float32()))
    path = tmp_path_factory.mktemp("engines") / "x.parquet"
    pq.write_table(pa.table({"id": np.arange(N), "v": lists}), path, row_group_size=60)
    return path, x


def expected(x):
    return sjlt.Sketch(D, K, seed=5).project(x)


def test_datasets(source, tmp_path):
    datasets = pytest.importorskip("datasets")
    path, x = source
    loaded = datasets.load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path), split="train")
    P = Projector("v", K, seed=5)
    mapped = loaded.with_format("arrow").map(P, batched=True, batch_size=70).with_format("numpy")
    assert mapped.column_names == ["id", "v"]
    assert np.array_equal(np.stack(mapped["v"][:]), expected(x))
    two = loaded.with_format("arrow").map(P, batched=True, batch_size=70, num_proc=2).with_format("numpy")
    assert np.array_equal(np.stack(two["v"][:]), expected(x))


def test_datasets_reads_its_own_files_after_projection(source, tmp_path):
    """The file metadata in which datasets records the old column's type is dropped."""
    datasets = pytest.importorskip("datasets")
    from sjlt.files.parquet import project_parquet

    _, x = source
    features = datasets.Features({"v": datasets.List(datasets.Value("float32"), length=D)})
    datasets.Dataset.from_dict({"v": x}, features=features).to_parquet(str(tmp_path / "hf.parquet"))
    project_parquet(tmp_path / "hf.parquet", tmp_path / "y.parquet", K, seed=5)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "y.parquet"), cache_dir=str(tmp_path), split="train"
    )
    assert np.array_equal(np.stack(loaded.with_format("numpy")["v"][:]), expected(x))


def test_duckdb(source):
    duckdb = pytest.importorskip("duckdb")
    path, x = source
    table = duckdb.sql(f"select id, v from '{path}' order by id").to_arrow_table()
    projected = Projector("v", K, seed=5)(table)  # the query refers to it by name
    rows = duckdb.sql("select v from projected where id >= 100 order by id").fetchall()
    assert np.array_equal(np.array([row[0] for row in rows], np.float32), expected(x)[100:])
    assert len(projected) == N


def test_ray(source):
    ray = pytest.importorskip("ray")
    path, x = source
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        data = ray.data.read_parquet(str(path))
        mapped = data.map_batches(Projector("v", K, seed=5), batch_format="pyarrow", batch_size=70)
        rows = sorted(mapped.take_all(), key=lambda row: row["id"])
        tensors = ray.data.from_numpy(x).map_batches(Projector("data", K, seed=5), batch_format="pyarrow")
        projected = [row["data"] for row in tensors.take_all()]
    finally:
        ray.shutdown()
    assert np.array_equal(np.stack([row["v"] for row in rows]), expected(x))
    assert np.array_equal(np.stack(projected), expected(x))


@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_spark(source, monkeypatch):
    sql = pytest.importorskip("pyspark.sql")
    import sys

    path, x = source
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    try:
        frame = spark.read.parquet(str(path))
        P = Projector("v", K, n_features=D, seed=5, list_type="list")
        rows = frame.mapInArrow(P.map, "id long, v array<float>").orderBy("id").collect()
    finally:
        spark.stop()
    assert np.array_equal(np.array([row["v"] for row in rows], np.float32), expected(x))
