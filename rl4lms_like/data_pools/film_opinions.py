"""Short film opinions generated from a built-in grammar: English sentences with sentiment, without any download.

    opinion    I saw this Korean cartoon on my laptop and the script seemed cold. ...
    opening    I saw this Korean cartoon                  the first five words determine the split
    prompt     I saw this Korean cartoon on my            five to seven words
    reference  laptop and the script seemed cold. ...     the rest

The split of an opening depends neither on the seed nor on the number of texts, so a held-out prompt never begins a
training text. Python's hash randomisation has no influence: a seed gives the same texts in every process.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.system.errors import DataPoolError

OPENING_WORDS = 5  # number of words that determine an opinion's split; also the minimum prompt length
_MOODS = {"praise": 0.46, "blame": 0.42, "shrug": 0.12}
_HELD_OUT_FRACTION = 20  # val and test each get one opening in 20


class FilmOpinions(TextGenPool):
    """Beginnings of film opinions as prompts, with the rest of each opinion as its reference."""

    @classmethod
    def prepare(
        cls,
        split: str,
        n_train: Annotated[int, Interval(ge=0, le=1_000_000)] = 2000,
        n_eval: Annotated[int, Interval(ge=0, le=1000)] = 200,
        seed: int = 0,
        prompt_words: Sequence[int] = (OPENING_WORDS, 7),
    ) -> FilmOpinions:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            n_train: number of samples of `train`: the first texts of `film_opinions(n, seed)`.
            n_eval: number of samples of `val` and of `test`; limited, because held-out openings are rare.
            seed: seed of texts and prompt lengths.
            prompt_words: minimum and maximum prompt length in words; at least `OPENING_WORDS`.

        Raises:
            DataPoolError: unknown split, or prompts too short to keep held-out openings apart.
        """
        shortest, longest = prompt_words
        if not OPENING_WORDS <= shortest <= longest:
            expected = f"[shortest, longest] with {OPENING_WORDS} <= shortest <= longest"
            raise DataPoolError(f"film_opinions: prompt_words: expected {expected}, got {list(prompt_words)}")

        # A generator of its own for the lengths: the texts are the same whatever `prompt_words` is.
        texts = film_opinions(n_train if split == "train" else n_eval, seed, split=split)
        rng = random.Random(f"{seed}-{split}-prompts")
        samples = []
        for index, text in enumerate(texts):
            prompt, continuation = split_opinion(text, rng.randint(shortest, longest))
            samples.append(Sample(f"{split}_{index}", prompt, [continuation]))
        return cls(samples)


@lru_cache(maxsize=16)  # an evaluation, a replay or the next run of a process reads the same texts
def film_opinions(n: int, seed: int, *, split: str = "train") -> tuple[str, ...]:
    """Generate distinct opinions of one to three sentences: about 46 % praise, 42 % blame, the rest neutral or mixed.

    A smaller `n` gives a prefix of a larger one: `film_opinions(10, seed) == film_opinions(99, seed)[:10]`. Texts of
    different seeds are independent. Opinions of `val` and `test` also have distinct openings.

    Raises:
        DataPoolError: unknown split.
    """
    if split not in SPLITS:
        raise DataPoolError(f"film_opinions: unknown split {split!r}; known: {', '.join(SPLITS)}")

    # Texts of other splits are rejected: of 20 openings, 18 are of `train`, and one each of `val` and `test`. The key
    # decides what counts as a repetition: the text in `train`; elsewhere its opening, which the prompt begins with.
    texts: dict[str, str] = {}
    rng = random.Random(f"{seed}-{split}")
    while len(texts) < n:
        [mood] = rng.choices(list(_MOODS), weights=list(_MOODS.values()))
        text = write(mood, rng)
        if split_of(text) == split:
            texts.setdefault(text if split == "train" else opening(text), text)
    return tuple(texts.values())


def opening(text: str) -> str:
    """Return the first `OPENING_WORDS` words, which determine the split."""
    return " ".join(text.split(" ", OPENING_WORDS)[:OPENING_WORDS])


def split_of(text: str) -> str:
    """Return the split of a text, which depends on its opening only."""
    bucket = zlib.crc32(opening(text).encode()) % _HELD_OUT_FRACTION
    return {0: "val", 1: "test"}.get(bucket, "train")


def split_opinion(text: str, n_words: int) -> tuple[str, str]:
    """Return prompt and continuation; the continuation has at least two words if the text is long enough."""
    words = text.split(" ")
    n_words = max(OPENING_WORDS, min(n_words, len(words) - 2))
    return " ".join(words[:n_words]), " ".join(words[n_words:])


# --- grammar ---------------------------------------------------------------------------------------------------------
#
#     symbol:  option | option {with} {symbols} | ...
#
# An option is drawn uniformly; each `{symbol}` in it is expanded in the same way. A line that starts with a space
# continues the line above. `~` is the empty text. Every text starts from `praise`, `blame` or `shrug`. Clauses are in
# lower case; capital letters and "an" are applied to the finished text.
#
# Opinions begin with a scene (who saw which film, where), so that the first words do not reveal the sentiment. Closing
# remarks are composed from parts: with a fixed list of remarks, a policy that is rewarded for praise would end every
# text with the same sentence.

TABLE = """
praise: {scene} and {good_view}. | {scene} and {good_view}. {good_close}.
    | {scene} and {good_view}. {good_view}. | {scene}. {good_view}. {good_close}.
    | {scene} and {good_view}. {good_view}. {good_close}. | {scene}. {good_view}.
    | {scene} and {good_view}, {while} {good_view}. | {film} {was} {good} and {good_view}.
    | {film} {was} {good} and {good_more}. {good_close}. | {film} {delighted} {us}. {good_view}. {good_close}.
blame: {scene} and {bad_view}. | {scene} and {bad_view}. {bad_close}. | {scene} and {bad_view}. {bad_view}.
    | {scene}. {bad_view}. {bad_close}. | {scene} and {bad_view}. {bad_view}. {bad_close}.
    | {scene}. {bad_view}. | {scene} and {bad_view}, {while} {bad_view}. | {film} {was} {bad} and {bad_view}.
    | {film} {was} {bad} and {bad_more}. {bad_close}. | {film} {annoyed} {us}. {bad_view}. {bad_close}.
shrug: {scene} and {plain_view}. | {scene} and {plain_view}. {plain_close}.
    | {scene}. {plain_view}. {plain_close}. | {scene}. {plain_close}.
    | {film} {was} {plain} and {plain_view}. {plain_close}. | {scene}. {good_view}, but {bad_view}.
    | {scene}. {bad_view}, but {good_view}.

while: and | while | just as

scene: {who} {saw} {film} {where} | {who} {saw} {film} {where} | {when} {relative} {saw} {film}
    | {relative} {picked} {film} {occasion} | {film} {follows} {heroes} {in_place} | {film} {came} {where}
film: {this} {origin} {genre}
this: this | this | this | the new | another
who: i | i | we | we | my parents | the neighbours
saw: saw | watched | caught | rented | found
picked: picked | brought | ordered | suggested | showed us
follows: follows | is about | shows | tells of
heroes: two {hero} | three {hero} | four {hero} | a family of {hero} | some {hero}
hero: sailors | teachers | bakers | nurses | farmers | painters | students | cousins | drivers | monks
in_place: in {town} | near {town} | on the way to {town}
town: Lisbon | Oslo | Vienna | Dublin | Prague | Athens | Lima | Cairo | Kyoto | Montreal
came: was shown | opened | ran | could be seen
where: on my laptop | at the cinema | at the town hall | at the museum | on a plane | on the train
    | in our garden | at the library | in a tent | at the old theatre | in the school hall | on the ferry
    | at home | in {town}
when: last night | last week | yesterday | on Sunday | on Friday | on Tuesday | in March | in June | in October
    | this morning
occasion: for Sunday night | for the weekend | for our anniversary | after dinner | before breakfast | on Friday
    | for a long flight | during the storm | for movie night | in the winter

relative: my {kin}
kin: sister | brother | mother | father | aunt | uncle | cousin | neighbour | teacher | grandmother | flatmate
    | wife | husband | daughter | son
us: us | me | everyone | {relative} | the whole room
we: {critic} | {critic} | {critic} | everyone
critic: i | we | {relative}

origin: Korean | Danish | French | Italian | Polish | Irish | Indian | Mexican | Brazilian | Turkish | Greek
    | Swedish | Japanese | Canadian | Spanish | Finnish | Chinese | Egyptian | Welsh | Hungarian
genre: western | cartoon | musical | drama | mystery | fantasy | documentary | biography | road movie
    | silent film | costume drama | sports film | family film | science film | fairy tale | legend | puppet film
    | courtroom drama | space opera | spy film | school story | sea story | dance film | travel film
    | nature film | heist film | political film | detective story

thing: acting | plot | script | music | camera work | lighting | editing | dialogue | pacing | ending | cast
    | soundtrack | voice work | dubbing | set design | costume work | direction | narration | final scene
    | first hour | second half | title song | animation | photography | sound design | choreography
things: songs | costumes | stunts | dances | effects | sets | landscapes | subtitles | flashbacks | portraits
subject: the {thing} | the {thing} | the {thing} | the {things}
player: lead | director | narrator | composer | writer | child actor | old captain | young doctor | chorus
    | cook
was: was | was | seemed | felt | looked
were: were | were | seemed | felt | looked

good_view: the {thing} {was} {so} {good} | the {thing} {was} {good} and {good} | the {things} {were} {so} {good}
    | the {things} {were} {good} and {good} | {we} {loved} {subject} | {subject} {delighted} {us}
    | the {player} {delighted} {us} | the {player} gave {us} a {good} {part}
good_more: {good} | {good_view} | {so} {good} | {good_view}
bad_view: the {thing} {was} {too} {bad} | the {thing} {was} {bad} and {bad} | the {things} {were} {too} {bad}
    | the {things} {were} {bad} and {bad} | {we} {hated} {subject} | {subject} {annoyed} {us}
    | the {player} {annoyed} {us} | the {player} gave {us} a {bad} {part}
bad_more: {bad} | {bad_view} | {too} {bad} | {bad_view}
plain_view: the {thing} {was} {plain} | the {thing} {was} {plain} and {plain} | the {things} {were} {plain}
    | {we} {noticed} {subject} | the {player} gave {us} a {plain} {part}

so: ~ | really | simply | very | so
too: ~ | rather | far too | just too | so
part: hour | speech | moment | performance | scene | monologue
loved: loved | enjoyed | praised | admired | adored | liked
delighted: delighted | charmed | impressed | thrilled | amused
hated: hated | disliked | loathed | regretted | despised
annoyed: annoyed | bored | irritated | disappointed | saddened
noticed: noticed | talked about | remembered | discussed | described

good: amazing | awesome | adorable | beautiful | brave | breathtaking | brilliant | charming | cheerful | clever
    | creative | delightful | elegant | enjoyable | entertaining | excellent | exciting | fantastic
    | fascinating | funny | generous | glorious | good | graceful | great | heartwarming | hilarious | honest
    | impressive | inspiring | joyful | likeable | lively | lovely | magnificent | outstanding | perfect
    | playful | pleasant | powerful | splendid | stunning | superb | sweet | terrific | thoughtful | wonderful
bad: annoying | appalling | awful | bad | bitter | boring | careless | confusing | crude | cruel | depressing
    | disappointing | dismal | dreadful | dreary | dull | dumb | embarrassing | fake | foolish | forced
    | frustrating | grim | hateful | hopeless | horrible | insulting | irritating | lame | lazy | lousy | messy
    | miserable | nasty | painful | pathetic | poor | ridiculous | rotten | shameful | stupid | terrible | ugly
    | unpleasant | weak | worthless
plain: quiet | long | short | slow | modern | old | simple | plain | ordinary | average | familiar | typical
    | traditional | loud | dark | brief | distant | unusual | rural | urban | seasonal | theatrical
    | conventional | lengthy | minimal | moderate | standard | episodic | wordy | historical | regular
    | abstract | muted | small

good_close: {we} would {gladly} {revisit} it {company} {soon} | {we} would {gladly} {lend} it to {people}
    | it is {a_joy} from {first} {to_last} | {a_film} {good} {picture} for {audience}
    | {take} {relative} and enjoy {every} {minute} | {we} {smiled} {all_along}
    | {we} {loved} {every} {minute} of it | {a_joy} for {audience}
gladly: gladly | happily | proudly
revisit: watch | see | rent | try
lend: lend | show | recommend | give
smiled: smiled | laughed | cheered | applauded
a_joy: a joy | a delight | a triumph | a success | a pleasure | a gift | a treasure | a miracle
bad_close: {critic} would never {revisit} it {company} {soon} | {critic} would never {lend} it to {people}
    | it is {a_mess} from {first} {to_last} | {a_film} {bad} {picture} for {audience}
    | {warn} {relative} about {every} {minute} | {we} {wept} {all_along} | {we} {hated} {every} {minute} of it
    | {a_mess} for {audience}
warn: warn | we should warn | someone should warn | i must warn
wept: cringed | suffered | groaned | despaired
a_mess: a mess | a failure | a disaster | a disappointment | a bore | an insult | a shame | a tragedy
plain_close: it runs for {length} | {we} went home {by_tram} {soon} | it ends {in_place} {soon}
    | {a_film} {plain} {picture} for {audience} | {we} saw it {company} {for_long} | {we} left after {length}
for_long: for {length} | all through {first} | from {first} {to_last}
length: two hours | ninety minutes | an hour | three hours | half a day
by_tram: by tram | on foot | by bus | in the rain | without a word

a_film: a | a | such a | just a | once more a
picture: film | picture | story | evening | piece of work | debut | sequel | matinee
audience: {people} | {people} | a quiet {day} | a long {day}
people: the whole family | {relative} | children in {town} | students of film | people over {age}
    | {hero} from {town}
day: Sunday | Friday | Tuesday | evening | afternoon | journey
age: twelve | thirty | fifty | seventy
company: with {relative} | with the neighbours | with {hero} | in {town} | ~
soon: soon | next week | on Sunday | in the summer | one day | at once | again
take: take | bring | ask | join
every: every | every single | each | almost every
minute: minute | scene | second | shot | line | note | page
all_along: {for_long} | {for_long} | all the way home
first: the first {minute} | the opening | the overture | the titles
to_last: to the last {minute} | to the very end | to the finale | to the last {minute}
"""


def _parsed(table: str) -> dict[str, list[list[str]]]:
    """Parse the table to symbol -> options; an option alternates text (even indices) and symbols (odd indices)."""
    joined = re.sub(r"\n[ ]+", " ", table)  # a line that starts with a space continues the line above
    rules: dict[str, list[list[str]]] = {}
    for line in filter(None, joined.splitlines()):
        symbol, _, options = line.partition(": ")
        rules[symbol] = []
        for option in options.split("|"):
            text = option.strip()
            if text == "~":
                text = ""
            # "the {thing} {was}" is split into ["the ", "thing", " ", "was", ""].
            rules[symbol].append(re.split(r"\{(\w+)\}", text))
    return rules


RULES: Mapping[str, list[list[str]]] = _parsed(TABLE)
"""Grammar: symbol -> options, each `[text, symbol, text, symbol, ..., text]`."""

ONCE = frozenset({"good", "bad", "plain", "thing", "things", "player", "kin", "hero", "town"})
"""Symbols of which a text uses each option at most once."""


def write(symbol: str, rng: random.Random) -> str:
    """Generate one formatted text from a symbol: `praise`, `blame` or `shrug`."""
    return _typeset(_expanded(symbol, rng, set()))


def _expanded(symbol: str, rng: random.Random, used: set[int]) -> str:
    """Expand a symbol at random; `used` holds the ids of the options that must not be used again."""
    option = rng.choice(RULES[symbol])
    if symbol in ONCE:
        while id(option) in used:
            option = rng.choice(RULES[symbol])
        used.add(id(option))

    # Expanded from left to right: the order of the draws decides the text of a seed.
    text = ""
    for index, piece in enumerate(option):
        is_symbol = index % 2 == 1
        text += _expanded(piece, rng, used) if is_symbol else piece
    return text


def _typeset(text: str) -> str:
    """Return a text with single spaces, "an" before vowels, "I" and capital letters at the start of sentences."""
    # Options that are empty leave double spaces, or a space before a full stop or a comma.
    text = re.sub(r" +", " ", text).replace(" .", ".").replace(" ,", ",")
    text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    text = re.sub(r"\bi\b", "I", text)
    return re.sub(r"(^|[.] )([a-z])", lambda match: match[1] + match[2].upper(), text)
