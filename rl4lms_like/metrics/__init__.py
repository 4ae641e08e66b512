"""Registry of the metrics. `METRICS` has every metric by id; `train_evaluation.metrics` in a config selects them."""

from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.system.registry import Entry, Registry, derived_from

_DIVERSITY = (
    *("total_length", "mean_pred_length", "std_pred_length"),
    *("median_pred_length", "min_pred_length", "max_pred_length"),
    *("distinct-1", "vocab_size-1", "unique-1", "entropy-1"),
    *("distinct-2", "vocab_size-2", "unique-2", "entropy-2"),
    *("distinct-3", "vocab_size-3", "unique-3", "entropy-3"),
    *("cond_entropy-2", "cond_entropy-3"),
)
"""GEM-metrics' names of the statistics of tokens including punctuation."""

_PARENT_SCORES = ("/precision", "/recall", "_f_score")

METRICS = Registry(
    "metric",
    group="rl4lms_like.metrics",
    misfit=derived_from(
        "rl4lms_like.metrics.base:BaseMetric",
        alternative=", or a function with a parameter `responses`, `response` or `completions`",
    ),
    table={
        "reward": Entry(
            ".run_reward:RewardMetric",
            "the run's own reward: mean, standard deviation, mean of each part of a combined reward",
            needs="an RL run",
            keys=("reward/mean", "reward/std", "reward/parts/{part}"),
        ),
        "python": Entry(
            ".python_function:PythonMetric",
            "mean of the values of a Python function, sync or async",
            keys=("python/{function}",),
        ),
        "object": Entry(".python_function:built_metric", "a metric that was built in Python", keys=("{key}",)),
        "increasing_numbers": Entry(
            ".synthetic:IncreasingNumbersinText",
            "fraction of each response that is increasing numbers",
            keys=("synthetic/increasing_numbers_in_text",),
        ),
        "dates": Entry(
            ".synthetic:DateInText",
            "fraction of responses with a date such as 2022-10-04",
            keys=("synthetic/dates_in_text",),
        ),
        "sentiment": Entry(
            ".sentiment:SentimentMetric",
            "VADER sentiment score of the texts, -1 to 1",
            keys=("semantic/sentiment", "semantic/sentiment_positive"),
        ),
        "distinct_n": Entry(
            ".diversity:DistinctN",
            "distinct n-grams, the most frequent sentence, unique texts",
            keys=(
                "diversity_metrics/distinct-1",
                "diversity_metrics/distinct-2",
                "diversity_metrics/top_sentence_share",
                "diversity_metrics/unique_texts",
            ),
        ),
        "length": Entry(".diversity:Length", "mean words per response", keys=("length/words",)),
        "diversity": Entry(
            ".diversity:DiversityMetrics",
            "GEM-metrics' statistics: type-token ratio, lengths, distinct n-grams, entropies",
            needs="extra 'lexical', NLTK's punkt_tab",
            keys=(
                "diversity_metrics/msttr-{n}",
                "diversity_metrics/msttr-{n}_nopunct",
                *(f"diversity_metrics/{name}" for name in _DIVERSITY),
                *(f"diversity_metrics/{name}-nopunct" for name in _DIVERSITY),
            ),
        ),
        "novelty": Entry(
            ".diversity:NoveltyMetric",
            "fraction of n-grams and of texts that do not occur in a file of training texts",
            keys=("diversity_metrics/novelty-{n}", "diversity_metrics/novel_texts"),
        ),
        "meteor": Entry(
            ".lexical:MeteorMetric",
            "METEOR (matching words, stems and synonyms), best reference, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, WordNet",
            keys=("lexical/meteor",),
        ),
        "rouge": Entry(
            ".lexical:RougeMetric",
            "ROUGE F-measure with stemming, first or best reference, 0 to 1",
            needs="extra 'lexical'",
            keys=("lexical/rouge_rouge1", "lexical/rouge_rouge2", "lexical/rouge_rougeL", "lexical/rouge_rougeLsum"),
        ),
        "rouge_l_max": Entry(
            ".lexical:RougeLMax",
            "ROUGE-L as py-rouge computes it, best reference, 0 to 1",
            needs="extra 'lexical', WordNet",
            keys=("lexical/rouge_l_max",),
        ),
        "bleu": Entry(
            ".lexical:BLEUMetric",
            "BLEU-4 on whitespace tokens, all references, no smoothing, 0 to 1",
            keys=("lexical/bleu",),
        ),
        "sacre_bleu": Entry(
            ".lexical:SacreBLEUMetric",
            "sacrebleu's BLEU-4, all references, 0 to 1",
            needs="extra 'lexical'",
            keys=("lexical/sacrebleu",),
        ),
        "ter": Entry(
            ".lexical:TERMetric",
            "translation edit rate (edits per reference word); lower is better",
            needs="extra 'lexical'",
            keys=("lexical/ter",),
        ),
        "chrf": Entry(
            ".lexical:chrFmetric",
            "chrF (character n-gram overlap), best reference, 0 to 1",
            needs="extra 'lexical'",
            keys=("lexical/chrf",),
        ),
        "hf_evaluate": Entry(
            ".hf_evaluate:EvaluateMetric",
            "any metric of the library evaluate, by name or folder",
            needs="extra 'lexical', the metric's script (hub or folder)",
            keys=("evaluate/{name}/{key}",),
        ),
        "reference_perplexity": Entry(
            ".perplexity:ReferencePerplexity",
            "perplexity of the responses under a frozen causal language model",
            needs="the named model, a causal one",
            keys=("fluency_metrics/reference_perplexity",),
        ),
        "causal_perplexity": Entry(
            ".perplexity:Perplexity",
            "perplexity of the references under the evaluated model",
            needs="the named tokenizer",
            keys=("fluency_metrics/perplexity",),
        ),
        "learned_reward": Entry(
            ".learned:LearnedRewardMetric",
            "probability of one label under a classifier of prompt and response",
            needs="the named model, a sequence classifier",
            keys=("semantic/learned_automodel_metric",),
        ),
        "reward_model": Entry(
            ".learned:RewardModelMetric",
            "logit, or a label's probability, of any reward model or sequence classifier",
            needs="the named model, a sequence classifier",
            keys=("semantic/reward_model",),
        ),
        "llm_judge": Entry(
            ".learned:LLMJudgeMetric",
            "score by a language model, or fraction of their comparisons that the responses win",
            needs="an OpenAI-compatible server, or the named model, a causal language model",
            keys=("semantic/llm_judge",),
        ),
        "bert_score": Entry(
            ".learned:BERTScoreMetric",
            "BERTScore's F1 against the best reference",
            needs="extra 'semantic', a model of the hub (roberta-large for English) or a local one",
            keys=("semantic/bert_score",),
        ),
        "bleurt": Entry(
            ".learned:BLEURTMetric",
            "BLEURT against the best reference",
            needs="a BLEURT checkpoint as plain BERT (Elron/bleurt-base-128)",
            keys=("semantic/bleurt",),
        ),
        "intent_accuracy": Entry(
            ".learned:IntentAccuracyDailyDialog",
            "fraction of responses with the requested intent",
            needs="the model rajkumarrrk/roberta-daily-dialog-intent-classifier",
            keys=("intent/accuracy",),
        ),
        "parent_totto": Entry(
            ".lexical:ParentToTTo",
            "PARENT as ToTTo's script computes it, all texts and both subsets, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
            keys=(
                *(f"table_to_text/parent_overall{score}" for score in _PARENT_SCORES),
                *(f"table_to_text/parent_overlap{score}" for score in _PARENT_SCORES),
                *(f"table_to_text/parent_non_overlap{score}" for score in _PARENT_SCORES),
            ),
        ),
        "bleu_totto": Entry(
            ".lexical:BLEUToTTo",
            "BLEU-4 as ToTTo's script computes it, all texts and both subsets, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
            keys=("table_to_text/bleu_overall", "table_to_text/bleu_overlap", "table_to_text/bleu_non_overlap"),
        ),
        "cider": Entry(
            ".lexical:CIDERMetric",
            "CIDEr-D (n-gram overlap weighted by rarity), 0 to 10",
            needs="extra 'captions'",
            keys=("lexical/cider",),
        ),
        "spice": Entry(
            ".lexical:SpiceMetric",
            "SPICE (overlap of objects, attributes and relations), 0 to 1",
            needs="extra 'captions', Java 8 to 14, CoreNLP 3.6.0",
            keys=("lexical/spice",),
        ),
        "summaCZS": Entry(
            ".consistency:SummaCZSMetric",
            "SummaC: consistency of summaries with their documents, zero-shot, -1 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, an NLI model (roberta-large-mnli)",
            keys=("consistency/summaczs",),
        ),
        "summaCConv": Entry(
            ".consistency:SummaCConvMetric",
            "SummaC: consistency of summaries with their documents, by a trained head, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, NLI models, a trained head",
            keys=("consistency/summacconv",),
        ),
        "exact_match": Entry(
            ".answers:ExactMatchMetric",
            "fraction of responses that equal, or whose extracted answer equals, a reference",
            keys=("answers/exact_match",),
        ),
        "math_equal": Entry(
            ".answers:MathEqualMetric",
            "fraction of responses whose final number equals that of a reference",
            keys=("answers/math_equal",),
        ),
        "reasoning_gym": Entry(
            ".answers:ReasoningGymMetric",
            "fraction of responses that are the answer to a question of reasoning-gym",
            needs="with `strict: false` extra 'reasoning'",
            keys=("answers/reasoning_gym",),
        ),
        "regex": Entry(
            ".answers:RegexMetric", "fraction of responses that match a regular expression", keys=("answers/regex",)
        ),
        "pass_at_k": Entry(
            ".answers:PassAtK", "probability that one of k samples of a prompt is right", keys=("answers/pass@{k}",)
        ),
        "maj_at_k": Entry(
            ".answers:MajAtK", "fraction of right answers by majority vote over k samples", keys=("answers/maj@{k}",)
        ),
    },
)
MetricRegistry = METRICS  # alias with RL4LMs' name
__all__ = ["METRICS", "BaseMetric", "MetricRegistry", "MetricResults"]
