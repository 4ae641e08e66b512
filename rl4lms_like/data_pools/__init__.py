"""Registries of the data pools and of the samplers of prompts.

DATA_POOLS    every pool by id; `datapool.id` in a config selects one
SAMPLERS      samplers other than the default by id; `datapool.sampler.id` in a config selects one
"""

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.system.registry import Entry, Registry, derived_from

_HUB_OR_LOCAL_COPY = "extra 'data' and the hub, or a local copy in `data_dir`"


def _published(target: str, summary: str, needs: str = _HUB_OR_LOCAL_COPY) -> Entry:
    return Entry(target, summary, needs=needs)


DATA_POOLS = Registry(
    "data pool",
    group="rl4lms_like.data_pools",
    misfit=derived_from("rl4lms_like.data_pools.base:TextGenPool"),
    table={
        "episodes": Entry(".episodes:NumberedEpisodes", "numbered episodes, for environments that need no data"),
        "dummy_pool": Entry(".dummy:DummyPool", "one prompt, repeated"),
        "film_opinions": Entry(".film_opinions:FilmOpinions", "short film opinions from a grammar, mixed sentiment"),
        "reasoning_gym": Entry(
            ".reasoning_gym:ReasoningGymPool",
            "questions with answers, of a data set of reasoning-gym",
            needs="extra 'reasoning'",
        ),
        "sums": Entry(".sums:Sums", "sums of two numbers with their results"),
        "shapes": Entry(".shapes:Shapes", "drawn shapes with questions, for vision models", needs="extra 'vision'"),
        "gsm8k": Entry(".gsm8k:Gsm8k", "word problems with their final answers, of local files (GSM8K)"),
        "jsonl": Entry(".files:JsonlPool", "fields of a local file: JSON Lines, JSON or parquet"),
        "csv": Entry(".files:CsvPool", "columns of a local CSV or TSV file"),
        "text": Entry(".files:TextPool", "beginnings of the texts in a local plain-text file"),
        "hf_dataset": Entry(
            ".hf_dataset:HfDatasetPool", "columns of a `datasets` dataset, local or from the hub", needs="extra 'data'"
        ),
        "preferences": Entry(
            ".preferences:PreferencePool", "pairs of a better and a worse response, or labelled responses, of any table"
        ),
        "imdb": _published(".imdb:IMDB", "film reviews to continue (IMDb)"),
        "imdb_seq2seq": _published(".imdb:IMDBForSeq2Seq", "positive film reviews for supervised training (IMDb)"),
        "commongen": _published(".common_gen:CommonGen", "sentences that use a set of concepts (CommonGen)"),
        "totto": _published(".totto:ToTTo", "sentences about the highlighted cells of a table (ToTTo)"),
        "cnn_daily_mail": _published(
            ".cnn_daily_mail:CNNDailyMail",
            "highlights of news articles (CNN / DailyMail)",
            f"{_HUB_OR_LOCAL_COPY}; with `truncate_article` extra 'lexical', NLTK's punkt_tab",
        ),
        "narrative_qa": _published(
            ".narrative_qa:NarrativeQA",
            "questions about summaries of stories (NarrativeQA)",
            "extra 'data' and access to UnifiedQA's storage, or a local copy in `data_dir`",
        ),
        "wmt16": _published(".translation:WMT", "translations of any language pair, of WMT by default"),
        "wmt14_processed_en_de": _published(
            ".translation:WMT14PreprocessedEnDe", "translations from English to German (WMT 14, preprocessed)"
        ),
        "wmt16newsonly": _published(
            ".translation:WMT16NewsOnlyDatasetEnDe",
            "translations of news from English to German (News Commentary, WMT 16)",
        ),
        "iwslt2017en_de": _published(
            ".translation:IWSLT2017EnDe", "translations of talks from English to German (IWSLT 2017)"
        ),
        "crd3": _published(
            ".crd3:CRD3DialogueGeneration",
            "next turns of recorded games (CRD3)",
            "extra 'data' and access to GitHub, or a local copy in `data_dir`",
        ),
        "daily_dialog": _published(".daily_dialog:DailyDialog", "next utterances of dialogues (DailyDialog)"),
    },
    signature_of=lambda pool: pool.prepare,
)
DataPoolRegistry = DATA_POOLS  # RL4LMs' name
SAMPLERS = Registry(
    "sampler",
    group="rl4lms_like.samplers",
    misfit=derived_from("rl4lms_like.data_pools.sampler:PromptSampler"),
    table={
        "difficulty": Entry(
            "rl4lms_like.data_pools.sampler:DifficultySampler", "prefers prompts that are neither too hard nor too easy"
        ),
        "shuffled": Entry(
            "rl4lms_like.data_pools.sampler:ShuffledSampler", "draws every prompt once before it draws one again"
        ),
    },
)

__all__ = ["DATA_POOLS", "SAMPLERS", "DataPoolRegistry", "Sample", "TextGenPool"]
