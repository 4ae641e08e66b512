"""Registry of the data pools. `DATA_POOLS` holds every pool by id; `datapool.id` in a config selects one."""

from rl4lms_like.core.registry import Entry, Registry, derived_from
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool

_HUB_OR_LOCAL_COPY = "extra 'data' and the hub, or a local copy in `data_dir`"

DATA_POOLS = Registry(
    "data pool",
    group="rl4lms_like.data_pools",
    misfit=derived_from("rl4lms_like.data_pools.base:TextGenPool"),
    table={
        "dummy_pool": Entry("rl4lms_like.data_pools.dummy:DummyPool", "one prompt, repeated"),
        "film_opinions": Entry(
            "rl4lms_like.data_pools.film_opinions:FilmOpinions", "short film opinions from a grammar, mixed sentiment"
        ),
        "jsonl": Entry("rl4lms_like.data_pools.files:JsonlPool", "fields of a local JSON Lines file"),
        "csv": Entry("rl4lms_like.data_pools.files:CsvPool", "columns of a local CSV or TSV file"),
        "text": Entry("rl4lms_like.data_pools.text:TextPool", "beginnings of the texts in a local plain-text file"),
        "hf_dataset": Entry(
            "rl4lms_like.data_pools.hf_dataset:HfDatasetPool",
            "columns of a `datasets` dataset, local or from the hub",
            needs="extra 'data'",
        ),
        "imdb": Entry("rl4lms_like.data_pools.imdb:IMDB", "film reviews to continue (IMDb)", needs=_HUB_OR_LOCAL_COPY),
        "imdb_seq2seq": Entry(
            "rl4lms_like.data_pools.imdb:IMDBForSeq2Seq",
            "positive film reviews for supervised training (IMDb)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "commongen": Entry(
            "rl4lms_like.data_pools.common_gen:CommonGen",
            "sentences that use a set of concepts (CommonGen)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "totto": Entry(
            "rl4lms_like.data_pools.totto:ToTTo",
            "sentences about the highlighted cells of a table (ToTTo)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "cnn_daily_mail": Entry(
            "rl4lms_like.data_pools.cnn_daily_mail:CNNDailyMail",
            "highlights of news articles (CNN / DailyMail)",
            needs=f"{_HUB_OR_LOCAL_COPY}; with `truncate_article` extra 'lexical', NLTK's punkt_tab",
        ),
        "narrative_qa": Entry(
            "rl4lms_like.data_pools.narrative_qa:NarrativeQA",
            "questions about summaries of stories (NarrativeQA)",
            needs="extra 'data' and access to UnifiedQA's storage, or a local copy in `data_dir`",
        ),
        "wmt16": Entry(
            "rl4lms_like.data_pools.translation:WMT",
            "translations of any language pair, of WMT by default",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "wmt14_processed_en_de": Entry(
            "rl4lms_like.data_pools.translation:WMT14PreprocessedEnDe",
            "translations from English to German (WMT 14, preprocessed)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "wmt16newsonly": Entry(
            "rl4lms_like.data_pools.translation:WMT16NewsOnlyDatasetEnDe",
            "translations of news from English to German (News Commentary, WMT 16)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "iwslt2017en_de": Entry(
            "rl4lms_like.data_pools.translation:IWSLT2017EnDe",
            "translations of talks from English to German (IWSLT 2017)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
        "crd3": Entry(
            "rl4lms_like.data_pools.crd3:CRD3DialogueGeneration",
            "next turns of recorded games (CRD3)",
            needs="extra 'data' and access to GitHub, or a local copy in `data_dir`",
        ),
        "daily_dialog": Entry(
            "rl4lms_like.data_pools.daily_dialog:DailyDialog",
            "next utterances of dialogues (DailyDialog)",
            needs=_HUB_OR_LOCAL_COPY,
        ),
    },
    signature_of=lambda pool: pool.prepare,
)
DataPoolRegistry = DATA_POOLS
"""RL4LMs' name."""

__all__ = ["DATA_POOLS", "DataPoolRegistry", "Sample", "TextGenPool"]
