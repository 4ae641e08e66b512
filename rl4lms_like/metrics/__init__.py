"""What to report. `METRICS` has every metric by id; the config's `train_evaluation.metrics` names some."""

from rl4lms_like.core.registry import Entry, Registry, derived_from
from rl4lms_like.metrics.base import BaseMetric, MetricResults

_DIVERSITY = (
    *("total_length", "mean_pred_length", "std_pred_length", "median_pred_length", "min_pred_length"),
    "max_pred_length",
    *(f"{name}-{order}" for order in (1, 2, 3) for name in ("distinct", "vocab_size", "unique", "entropy")),
    *("cond_entropy-2", "cond_entropy-3"),
)
"""GEM-metrics' names, those of tokens with punctuation."""

METRICS = Registry(
    "metric",
    group="rl4lms_like.metrics",
    misfit=derived_from("rl4lms_like.metrics.base:BaseMetric"),
    table={
        "increasing_numbers": Entry(
            "rl4lms_like.metrics.synthetic:IncreasingNumbersinText",
            "how much of each response is numbers that grow",
            keys=("synthetic/increasing_numbers_in_text",),
        ),
        "dates": Entry(
            "rl4lms_like.metrics.synthetic:DateInText",
            "share of responses with a date like 2022-10-04",
            keys=("synthetic/dates_in_text",),
        ),
        "sentiment": Entry(
            "rl4lms_like.metrics.sentiment:SentimentMetric",
            "how positive the texts are by the VADER lexicon, -1 to 1",
            keys=("semantic/sentiment", "semantic/sentiment_positive"),
        ),
        "distinct_n": Entry(
            "rl4lms_like.metrics.diversity:DistinctN",
            "distinct n-grams, the most frequent sentence, unique texts",
            keys=(
                "diversity_metrics/distinct-1",
                "diversity_metrics/distinct-2",
                "diversity_metrics/top_sentence_share",
                "diversity_metrics/unique_texts",
            ),
        ),
        "length": Entry("rl4lms_like.metrics.diversity:Length", "mean words of the responses", keys=("length/words",)),
        "diversity": Entry(
            "rl4lms_like.metrics.diversity:DiversityMetrics",
            "GEM-metrics' statistics: type-token ratio, lengths, distinct n-grams, entropies",
            needs="extra 'lexical', NLTK's punkt_tab",
            keys=(
                "diversity_metrics/msttr-{n}",
                "diversity_metrics/msttr-{n}_nopunct",
                *(f"diversity_metrics/{name}{suffix}" for suffix in ("", "-nopunct") for name in _DIVERSITY),
            ),
        ),
        "novelty": Entry(
            "rl4lms_like.metrics.novelty:NoveltyMetric",
            "share of n-grams and of texts that a file of training texts does not have",
            keys=("diversity_metrics/novelty-{n}", "diversity_metrics/novel_texts"),
        ),
        "meteor": Entry(
            "rl4lms_like.metrics.lexical:MeteorMetric",
            "METEOR, best reference: words, stems and synonyms in common, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, WordNet",
            keys=("lexical/meteor",),
        ),
        "rouge": Entry(
            "rl4lms_like.metrics.lexical:RougeMetric",
            "ROUGE F with stems, first or best reference, 0 to 1",
            needs="extra 'lexical'",
            keys=(
                "lexical/rouge_rouge1",
                "lexical/rouge_rouge2",
                "lexical/rouge_rougeL",
                "lexical/rouge_rougeLsum",
            ),
        ),
        "rouge_l_max": Entry(
            "rl4lms_like.metrics.lexical:RougeLMax",
            "ROUGE-L as py-rouge counts it, best reference, 0 to 1",
            needs="extra 'lexical', WordNet",
            keys=("lexical/rouge_l_max",),
        ),
        "bleu": Entry(
            "rl4lms_like.metrics.lexical:BLEUMetric",
            "BLEU-4 on whitespace tokens, all references, no smoothing, 0 to 1",
            keys=("lexical/bleu",),
        ),
        "sacre_bleu": Entry(
            "rl4lms_like.metrics.lexical:SacreBLEUMetric",
            "sacrebleu's BLEU-4, all references, 0 to 1",
            needs="extra 'lexical'",
            keys=("lexical/sacrebleu",),
        ),
        "ter": Entry(
            "rl4lms_like.metrics.lexical:TERMetric",
            "edits to the nearest reference per word of it; lower is better",
            needs="extra 'lexical'",
            keys=("lexical/ter",),
        ),
        "chrf": Entry(
            "rl4lms_like.metrics.lexical:chrFmetric",
            "chrF, character n-grams in common, best reference, 0 to 1",
            needs="extra 'lexical'",
            keys=("lexical/chrf",),
        ),
        "hf_evaluate": Entry(
            "rl4lms_like.metrics.hf_evaluate:EvaluateMetric",
            "any metric of the library evaluate, by name or folder",
            needs="extra 'lexical', the metric's script (hub or folder)",
            keys=("evaluate/{name}/{key}",),
        ),
        "reference_perplexity": Entry(
            "rl4lms_like.metrics.perplexity:ReferencePerplexity",
            "perplexity of the responses under a frozen causal language model",
            needs="the named model, a causal one",
            keys=("fluency_metrics/reference_perplexity",),
        ),
        "causal_perplexity": Entry(
            "rl4lms_like.metrics.perplexity:Perplexity",
            "perplexity of the references under the model that is evaluated",
            needs="the named tokenizer",
            keys=("fluency_metrics/perplexity",),
        ),
        "learned_reward": Entry(
            "rl4lms_like.metrics.learned:LearnedRewardMetric",
            "the probability that a classifier gives one label to prompt and response",
            needs="the named model, a sequence classifier",
            keys=("semantic/learned_automodel_metric",),
        ),
        "reward_model": Entry(
            "rl4lms_like.metrics.learned:RewardModelMetric",
            "the logit, or a label's probability, of any reward model or sequence classifier",
            needs="the named model, a sequence classifier",
            keys=("semantic/reward_model",),
        ),
        "bert_score": Entry(
            "rl4lms_like.metrics.semantic:BERTScoreMetric",
            "BERTScore's F1 against the best reference",
            needs="extra 'semantic', a model of the hub (roberta-large for English) or a local one",
            keys=("semantic/bert_score",),
        ),
        "bleurt": Entry(
            "rl4lms_like.metrics.semantic:BLEURTMetric",
            "BLEURT against the best reference",
            needs="a BLEURT checkpoint as plain BERT (Elron/bleurt-base-128)",
            keys=("semantic/bleurt",),
        ),
        "intent_accuracy": Entry(
            "rl4lms_like.metrics.dialog:IntentAccuracyDailyDialog",
            "share of responses with the asked-for intent",
            needs="the model rajkumarrrk/roberta-daily-dialog-intent-classifier",
            keys=("intent/accuracy",),
        ),
        "parent_totto": Entry(
            "rl4lms_like.metrics.tables:ParentToTTo",
            "PARENT as ToTTo's script computes it, all texts and both subsets, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
            keys=tuple(
                f"table_to_text/parent_{name}{score}"
                for name in ("overall", "overlap", "non_overlap")
                for score in ("/precision", "/recall", "_f_score")
            ),
        ),
        "bleu_totto": Entry(
            "rl4lms_like.metrics.tables:BLEUToTTo",
            "BLEU-4 as ToTTo's script computes it, all texts and both subsets, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
            keys=("table_to_text/bleu_overall", "table_to_text/bleu_overlap", "table_to_text/bleu_non_overlap"),
        ),
        "cider": Entry(
            "rl4lms_like.metrics.captions:CIDERMetric",
            "CIDEr-D, n-grams in common, rare ones worth more, 0 to 10",
            needs="extra 'captions'",
            keys=("lexical/cider",),
        ),
        "spice": Entry(
            "rl4lms_like.metrics.captions:SpiceMetric",
            "SPICE, objects, attributes and relations in common, 0 to 1",
            needs="extra 'captions', Java 8 to 14, CoreNLP 3.6.0",
            keys=("lexical/spice",),
        ),
        "summaCZS": Entry(
            "rl4lms_like.metrics.consistency:SummaCZSMetric",
            "whether summaries follow from their documents, zero-shot, -1 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, an NLI model (roberta-large-mnli)",
            keys=("consistency/summaczs",),
        ),
        "summaCConv": Entry(
            "rl4lms_like.metrics.consistency:SummaCConvMetric",
            "whether summaries follow from their documents, by a trained head, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, NLI models, a trained head",
            keys=("consistency/summacconv",),
        ),
        "exact_match": Entry(
            "rl4lms_like.metrics.answers:ExactMatchMetric",
            "share of responses that are, or hold the answer that is, a reference",
            keys=("answers/exact_match",),
        ),
        "math_equal": Entry(
            "rl4lms_like.metrics.answers:MathEqualMetric",
            "share of responses that end in the number of a reference",
            keys=("answers/math_equal",),
        ),
        "regex": Entry(
            "rl4lms_like.metrics.answers:RegexMetric",
            "share of responses that fit a regular expression",
            keys=("answers/regex",),
        ),
        "pass_at_k": Entry(
            "rl4lms_like.metrics.pass_at_k:PassAtK",
            "the chance that one of k samples of a prompt is right",
            keys=("answers/pass@{k}",),
        ),
    },
)
MetricRegistry = METRICS
"""RL4LMs' name."""

__all__ = ["METRICS", "BaseMetric", "MetricRegistry", "MetricResults"]
