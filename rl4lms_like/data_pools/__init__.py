"""What to prompt with. `DATA_POOLS` has every pool by id; the config's `datapool.id` names one."""

from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool

DATA_POOLS = Registry(
    "data pool",
    group="rl4lms_like.data_pools",
    table={
        "dummy_pool": Entry("rl4lms_like.data_pools.dummy:DummyPool", "one prompt, many times"),
        "film_opinions": Entry(
            "rl4lms_like.data_pools.film_opinions:FilmOpinions", "short film opinions from a grammar, mixed sentiment"
        ),
        "jsonl": Entry("rl4lms_like.data_pools.files:JsonlPool", "fields of a local file of JSON lines"),
        "csv": Entry("rl4lms_like.data_pools.files:CsvPool", "columns of a local CSV or TSV file"),
        "text": Entry("rl4lms_like.data_pools.text:TextPool", "openings of the texts in a local plain-text file"),
        "hf_dataset": Entry(
            "rl4lms_like.data_pools.hf_dataset:HfDatasetPool",
            "columns of a `datasets` data set, local or from the hub",
            needs="extra 'data'",
        ),
    },
    signature_of=lambda pool: pool.prepare,
)
DataPoolRegistry = DATA_POOLS
"""RL4LMs' name."""

__all__ = ["DATA_POOLS", "DataPoolRegistry", "Sample", "TextGenPool"]
