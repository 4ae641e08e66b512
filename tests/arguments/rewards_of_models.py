"""How each argument of the rewards that load models or start programs is seen to act."""

from __future__ import annotations

from tests.arguments.model_sights import devices, memory_of_java, precisions, scores_with_java, stopped
from tests.arguments.models import (
    BATCH_SIZE,
    BERT_SCORE,
    BLEURT,
    INTENT_ACCURACY,
    LEARNED_REWARD,
    OF_WEIGHTS,
    REWARD_MODEL,
    TRUST_REMOTE_CODE,
    concepts,
    dialogues,
    other,
    other_weights,
    references_file,
)
from tests.arguments.seen import Acts, Silent

_OF_A_FILE = {"weights": other_weights("seq2seq")}
_BY_SPICE = {"spice_coeff": 1.0, "cider_coeff": 0.0}

ROWS: dict[str, dict[str, Acts | Silent]] = {
    "learned_reward": LEARNED_REWARD,
    "reward_model": REWARD_MODEL,
    "process_reward": {
        "model_name": Acts(other("step_classifier")),
        "separator": Acts("o"),
        "aggregate": Acts("min"),
        "model_separator": Acts("!"),
        "label": Acts(0),
        "trust_remote_code": TRUST_REMOTE_CODE,
        **OF_WEIGHTS,
    },
    "bert_score": BERT_SCORE,
    "bleurt": {"checkpoint": Acts(other("regressor")), **BLEURT},
    "intent_accuracy": {
        "shape": Acts(False, texts=dialogues),
        "intent_coeff": Acts(2.0, texts=dialogues),
        "auto_coeff": Acts(2.0, texts=dialogues),
        **INTENT_ACCURACY,
    },
    "common_gen_preference_model": {
        "model_type": Silent("has no effect"),
        "concept_penalty_coeff": Acts(0.5, texts=concepts),
        "meteor_coeff": Acts(0.5, texts=concepts),
        "model_name": Acts(other("seq2seq")),
        "weights": Acts(other_weights("seq2seq")),
        "batch_size": BATCH_SIZE,
        "device": Acts("cuda:1", sees=devices, others={"device": "cpu", **_OF_A_FILE}),
        "dtype": Acts("bfloat16", sees=precisions, others=_OF_A_FILE),
    },
    "spider": {
        "spice_coeff": Acts(0.5, sees=scores_with_java),
        "cider_coeff": Acts(2.0),
        "references_file": Acts(references_file),
        "java_memory": Acts("2G", sees=memory_of_java, others=_BY_SPICE),
        "timeout": Acts(0.001, sees=stopped, others=_BY_SPICE),
    },
}
