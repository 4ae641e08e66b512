"""Registry of the reward functions. `REWARDS` holds every reward by id; `reward_fn.id` in a config selects one."""

from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction
from rl4lms_like.system.registry import Entry, Registry, derived_from

REWARDS = Registry(
    "reward",
    group="rl4lms_like.rewards",
    misfit=derived_from(
        "rl4lms_like.rewards.base:RewardFunction",
        "rl4lms_like.rewards.base:BatchedRewardFunction",
        alternative=(
            ", or a function with a parameter `responses`, `response` or `completions` (one of `steps` is for the "
            "reward `step_function`)"
        ),
    ),
    table={
        "increasing_numbers": Entry(
            ".synthetic:RewardIncreasingNumbers", "fraction of the response that is increasing numbers"
        ),
        "sentences_with_dates": Entry(
            ".synthetic:RewardSentencesWithDates", "1 if the response contains a date such as 2022-10-04"
        ),
        "combine": Entry(".combine:CombinedReward", "weighted sum of other rewards, each logged separately"),
        "sentiment": Entry(".sentiment:SentimentReward", "VADER sentiment score of the text, -1 to 1"),
        "meteor": Entry(
            ".lexical:MeteorRewardFunction",
            "METEOR (matching words, stems and synonyms), best reference, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, WordNet",
        ),
        "rouge": Entry(
            ".lexical:RougeRewardFunction",
            "ROUGE F-measure with stemming, first or best reference, 0 to 1",
            needs="extra 'lexical'",
        ),
        "rouge_combined": Entry(
            ".lexical:RougeCombined", "mean of ROUGE-1, -2 and -L, first reference, 0 to 1", needs="extra 'lexical'"
        ),
        "rouge_l_max": Entry(
            ".lexical:RougeLMaxRewardFunction",
            "ROUGE-L as py-rouge computes it, best reference, 0 to 1",
            needs="extra 'lexical', WordNet",
        ),
        "bleu": Entry(
            ".lexical:BLEURewardFunction", "BLEU-4 on whitespace tokens, all references, no smoothing, 0 to 1"
        ),
        "sacre_bleu": Entry(
            ".lexical:SacreBleu", "sacrebleu's BLEU-4, all references, 0 to 1", needs="extra 'lexical'"
        ),
        "ter": Entry(
            ".lexical:TER",
            "1 minus the translation edit rate (edits per reference word), at most 1",
            needs="extra 'lexical'",
        ),
        "chrf": Entry(
            ".lexical:chrF", "chrF (character n-gram overlap), best reference, 0 to 1", needs="extra 'lexical'"
        ),
        "learned_reward": Entry(
            ".learned:LearnedBatchedRewardFunction",
            "probability of one label, from a classifier that reads prompt and response",
            needs="the named model, a sequence classifier",
        ),
        "reward_model": Entry(
            ".learned:RewardModel",
            "logit or label probability from any reward model or sequence classifier",
            needs="the named model, a sequence classifier",
        ),
        "bert_score": Entry(
            ".learned:BERTScoreRewardFunction",
            "BERTScore F1 against the best reference",
            needs="extra 'semantic', a model from the hub (roberta-large for English) or a local one",
        ),
        "bleurt": Entry(
            ".learned:BLEURTRewardFunction",
            "BLEURT against the best reference",
            needs="a BLEURT checkpoint in plain BERT format (Elron/bleurt-base-128)",
        ),
        "intent_accuracy": Entry(
            ".learned:IntentAccuracy",
            "1 if the response has the requested intent, plus METEOR",
            needs="the model rajkumarrrk/roberta-daily-dialog-intent-classifier; for METEOR extra 'lexical', "
            "NLTK's punkt_tab, WordNet",
        ),
        "common_gen_preference_model": Entry(
            ".preference:CommonGenPrefRM",
            "probability that people prefer a sentence made of concepts, from a fine-tuned T5",
            needs="RL4LMs' T5-11B weights (a file) or your own T5; for METEOR extra 'lexical', "
            "NLTK's punkt_tab, WordNet",
        ),
        "parent": Entry(
            ".lexical:PARENTRewardFunction",
            "PARENT F-score against a ToTTo table and its sentences, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
        ),
        "spider": Entry(
            ".lexical:SpiderRewardFunction",
            "weighted sum of SPICE and CIDEr",
            needs="extra 'captions'; SPICE: Java 8 to 14, CoreNLP 3.6.0",
        ),
        "common_gen_repeat_penalty": Entry(
            ".common_gen:CommonGenPenaltyShapingFunction",
            "-1 for a sentence that only repeats its concepts or its instruction; for reward shaping",
        ),
        "common_gen_repeat_penalty_batched": Entry(
            ".common_gen:BatchedCommonGenPenaltyShapingFunction",
            "same as common_gen_repeat_penalty (RL4LMs' second name)",
        ),
        "exact_match": Entry(".answers:ExactMatchReward", "1 if the response, or the answer in it, equals a reference"),
        "math_equal": Entry(".answers:MathEqualReward", "1 if the final number of the response equals a reference"),
        "regex": Entry(".answers:RegexReward", "1 if the response matches a regular expression"),
        "reasoning_gym": Entry(
            ".answers:ReasoningGymReward",
            "1 if the response is the answer to a question of reasoning-gym",
            needs="with `strict: false` extra 'reasoning'",
        ),
        "length_penalty": Entry(".lengths:LengthPenalty", "penalty for every word, character or token above a length"),
        "soft_overlong": Entry(".lengths:SoftOverlong", "DAPO's penalty for responses near and above the length limit"),
        "repetition_penalty": Entry(".lengths:RepetitionPenalty", "penalty for the fraction of repeated n-grams"),
        "python": Entry(".python_function:PythonReward", "return value of a Python function, sync or async"),
        "environment": Entry(".environment:EnvironmentReward", "only the rewards of the steps of `env.dialogue`"),
        "object": Entry(".python_function:built_reward", "a reward that was built in Python"),
        "process_reward": Entry(
            ".steps:ProcessReward",
            "probability that each step of the response is good, at the end of the step",
            needs="the named model, a token classifier",
        ),
        "step_function": Entry(
            ".steps:StepFunctionReward", "scores of a Python function for the steps of the response, at their ends"
        ),
        "http": Entry(
            ".remote:HttpReward", "rewards returned by a server to a POST of the texts", needs="a scoring server"
        ),
        "llm_judge": Entry(
            ".remote:LLMJudgeReward",
            "score by a language model, or fraction of its comparisons that a response wins",
            needs="an OpenAI-compatible server, or the named model, a causal language model",
        ),
    },
)
RewardFunctionRegistry = REWARDS  # RL4LMs' name
_PENALTY = "a penalty is 0 for every text that it does not punish; add it to a reward for good texts"
_NO_4_GRAM = "a text has a BLEU-4 of 0 without four consecutive words in common, so has a reference of three words"
_PROMPT_COUNTS = (
    "the prompt is scored together with the response, so a positive prompt pays for any response, and a copy of it "
    "counts twice; set `include_prompt: false`"
)
_ANY_TEXT = {"empty": _PENALTY, "repetition": _PENALTY, "prompt_copy": _PENALTY}
_NOT_THE_PROMPT = {"empty": _PENALTY, "repetition": _PENALTY}

EXPLAINED_FINDINGS: dict[str, dict[str, str]] = {
    "increasing_numbers": {
        "prompt_copy": "the numbers of a prompt are increasing, and those of the references are not"
    },
    "sentences_with_dates": {
        "repetition": "one date is enough, so a repeated date is too; add `repetition_penalty`",
        "constant": "neither prompts nor references have a date",
    },
    "sentiment": {
        "empty": _PROMPT_COUNTS,
        "repetition": _PROMPT_COUNTS,
        "prompt_copy": _PROMPT_COUNTS,
        "verbosity": "VADER adds up the scores of the words and then limits the sum to 1, so a long text with positive "
        "words pays more than a short one; limit the length with `max_new_tokens` or `length_penalty`",
        "whitespace": "prompt and response are joined without a space, so a response that does not begin with one "
        "continues the prompt's last word; set `include_prompt: false`",
        "constant": "no text has a word of VADER's English lexicon",
        "slow": "the time of VADER grows with the square of the number of words with a sentiment",
    },
    "rouge": {"word_order": "`rouge1` compares words, not their order; use `rouge2` or `rougeL`"},
    "bleu": {"reference": _NO_4_GRAM},
    "sacre_bleu": {"reference": f"{_NO_4_GRAM}; set `use_effective_order` for such references"},
    "ter": {
        "magnitude": "every further word is an edit, so the reward has no lower bound and is lowest for long responses "
        "with short references; set `max_new_tokens` to about the length of the references"
    },
    "spider": {
        "alone": "the CIDEr of a single text is always 0 without `references_file`, which is an error; set it, or use "
        "several environments"
    },
    "common_gen_repeat_penalty": _NOT_THE_PROMPT,
    "common_gen_repeat_penalty_batched": _NOT_THE_PROMPT,
    "exact_match": {"whitespace": "`ignore_whitespace` is false"},
    "math_equal": {
        "prompt_copy": "the last number of a prompt is its answer",
        "long_tail": "words after the final number are ignored; limit the length, or set `extract`",
        "word_order": "only the final number is compared",
    },
    "regex": {
        "prompt_copy": "the prompts contain what the pattern matches; use a pattern that they do not match, or "
        "`match: fullmatch`",
        "whitespace": "with `match` and `fullmatch`, the pattern must also match the white space; use `\\s*`",
    },
    "length_penalty": _ANY_TEXT,
    "soft_overlong": _ANY_TEXT,
    "repetition_penalty": {"empty": _PENALTY, "prompt_copy": _PENALTY},
}
"""Id -> kind of a finding in `docs/reward_audit.md` (`audit.KINDS`) -> explanation."""

__all__ = ["REWARDS", "BatchedRewardFunction", "RewardFunction", "RewardFunctionRegistry"]
