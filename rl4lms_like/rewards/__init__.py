"""What to prefer. `REWARDS` has every reward by id; the config's `reward_fn.id` names one."""

from rl4lms_like.core.registry import Entry, Registry, derived_from
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction

REWARDS = Registry(
    "reward",
    group="rl4lms_like.rewards",
    misfit=derived_from("rl4lms_like.rewards.base:RewardFunction", "rl4lms_like.rewards.base:BatchedRewardFunction"),
    table={
        "increasing_numbers": Entry(
            "rl4lms_like.rewards.synthetic:RewardIncreasingNumbers", "how much of the response is numbers that grow"
        ),
        "sentences_with_dates": Entry(
            "rl4lms_like.rewards.synthetic:RewardSentencesWithDates", "1 if the response has a date like 2022-10-04"
        ),
        "combine": Entry(
            "rl4lms_like.rewards.combine:CombinedReward", "the weighted sum of other rewards, each logged on its own"
        ),
        "sentiment": Entry(
            "rl4lms_like.rewards.sentiment:SentimentReward", "how positive the text is by the VADER lexicon, -1 to 1"
        ),
        "meteor": Entry(
            "rl4lms_like.rewards.lexical:MeteorRewardFunction",
            "METEOR, best reference: words, stems and synonyms in common, 0 to 1",
            needs="extra 'lexical', NLTK's punkt_tab, WordNet",
        ),
        "rouge": Entry(
            "rl4lms_like.rewards.lexical:RougeRewardFunction",
            "ROUGE F with stems, first or best reference, 0 to 1",
            needs="extra 'lexical'",
        ),
        "rouge_combined": Entry(
            "rl4lms_like.rewards.lexical:RougeCombined",
            "mean of ROUGE-1, -2 and -L, first reference, 0 to 1",
            needs="extra 'lexical'",
        ),
        "rouge_l_max": Entry(
            "rl4lms_like.rewards.lexical:RougeLMaxRewardFunction",
            "ROUGE-L as py-rouge counts it, best reference, 0 to 1",
            needs="extra 'lexical', WordNet",
        ),
        "bleu": Entry(
            "rl4lms_like.rewards.lexical:BLEURewardFunction",
            "BLEU-4 on whitespace tokens, all references, no smoothing, 0 to 1",
        ),
        "sacre_bleu": Entry(
            "rl4lms_like.rewards.lexical:SacreBleu",
            "sacrebleu's BLEU-4, all references, 0 to 1",
            needs="extra 'lexical'",
        ),
        "ter": Entry(
            "rl4lms_like.rewards.lexical:TER",
            "1 minus the edits to the nearest reference per word of it; at most 1",
            needs="extra 'lexical'",
        ),
        "chrf": Entry(
            "rl4lms_like.rewards.lexical:chrF",
            "chrF, character n-grams in common, best reference, 0 to 1",
            needs="extra 'lexical'",
        ),
        "learned_reward": Entry(
            "rl4lms_like.rewards.learned:LearnedBatchedRewardFunction",
            "the probability that a classifier gives one label to prompt and response",
            needs="the named model, a sequence classifier",
        ),
        "reward_model": Entry(
            "rl4lms_like.rewards.learned:RewardModel",
            "the logit, or a label's probability, of any reward model or sequence classifier",
            needs="the named model, a sequence classifier",
        ),
        "bert_score": Entry(
            "rl4lms_like.rewards.semantic:BERTScoreRewardFunction",
            "BERTScore's F1 against the best reference",
            needs="extra 'semantic', a model of the hub (roberta-large for English) or a local one",
        ),
        "bleurt": Entry(
            "rl4lms_like.rewards.semantic:BLEURTRewardFunction",
            "BLEURT against the best reference",
            needs="a BLEURT checkpoint as plain BERT (Elron/bleurt-base-128)",
        ),
        "intent_accuracy": Entry(
            "rl4lms_like.rewards.dialog:IntentAccuracy",
            "whether a response has the asked-for intent, plus METEOR",
            needs="the model rajkumarrrk/roberta-daily-dialog-intent-classifier; for METEOR extra 'lexical', "
            "NLTK's punkt_tab, WordNet",
        ),
        "common_gen_preference_model": Entry(
            "rl4lms_like.rewards.preference:CommonGenPrefRM",
            "how likely people prefer a sentence made of concepts, by a tuned T5",
            needs="weights of RL4LMs' T5-11B (a file) or a T5 of one's own; for METEOR extra 'lexical', "
            "NLTK's punkt_tab, WordNet",
        ),
        "parent": Entry(
            "rl4lms_like.rewards.tables:PARENTRewardFunction",
            "PARENT's F against a ToTTo table and its sentences, 0 to 1",
            needs="extra 'lexical', ToTTo's tables in meta_data (the pool 'totto')",
        ),
        "spider": Entry(
            "rl4lms_like.rewards.captions:SpiderRewardFunction",
            "SPICE and CIDEr, weighted",
            needs="extra 'captions'; SPICE: Java 8 to 14, CoreNLP 3.6.0",
        ),
        "common_gen_repeat_penalty": Entry(
            "rl4lms_like.rewards.common_gen:CommonGenPenaltyShapingFunction",
            "-1 for a sentence that only repeats its concepts or its instruction; meant as shaping",
        ),
        "common_gen_repeat_penalty_batched": Entry(
            "rl4lms_like.rewards.common_gen:BatchedCommonGenPenaltyShapingFunction",
            "the same, under RL4LMs' second name",
        ),
        "exact_match": Entry(
            "rl4lms_like.rewards.answers:ExactMatchReward", "whether the response, or the answer in it, is a reference"
        ),
        "math_equal": Entry(
            "rl4lms_like.rewards.answers:MathEqualReward", "whether the response ends in the number of a reference"
        ),
        "regex": Entry("rl4lms_like.rewards.answers:RegexReward", "whether the response fits a regular expression"),
        "length_penalty": Entry(
            "rl4lms_like.rewards.lengths:LengthPenalty", "a price for every word, letter or token above a length"
        ),
        "soft_overlong": Entry(
            "rl4lms_like.rewards.lengths:SoftOverlong", "DAPO's price for responses near and above the length limit"
        ),
        "repetition_penalty": Entry(
            "rl4lms_like.rewards.lengths:RepetitionPenalty", "a price for the share of repeated n-grams"
        ),
        "python": Entry(
            "rl4lms_like.rewards.python_function:PythonReward", "what a Python function returns, sync or async"
        ),
        "http": Entry(
            "rl4lms_like.rewards.remote:HttpReward",
            "what a server answers to a POST of the texts",
            needs="a server that scores",
        ),
    },
)
RewardFunctionRegistry = REWARDS
"""RL4LMs' name."""

__all__ = ["REWARDS", "BatchedRewardFunction", "RewardFunction", "RewardFunctionRegistry"]
