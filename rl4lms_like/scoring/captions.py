"""Scores of captions: CIDEr-D on RL4LMs' tokens (Vedantam et al., 2015), and SPICE (Anderson et al., 2016).

CIDEr-D, n-gram overlap weighted by document frequency:

tokens     spaCy's English tokenizer, case kept, joined by spaces and split again
weight     count of an n-gram times log(documents / documents that contain it); a document is one text's references
score      10 x mean over n = 1..4 and over references of a clipped cosine, smaller if the lengths differ

The documents are the references of the batch, or those of a file. With those of the batch, a score depends on the other
texts of the batch, and a single text always gets 0: log(1 / 1).

SPICE, overlap of objects, attributes and relations, by its authors' Java program:

pycocoevalcap      includes spice-1.0.jar and most of its libraries
CoreNLP 3.6.0      two jars that must be copied next to them
Java 8 to 14       the program writes its results with the JavaScript engine that Java 15 removed

Each call of `spice` starts Java, which loads CoreNLP's models: this takes seconds and some gigabytes of memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.scoring.bleu import ORDER, ngrams_to_4
from rl4lms_like.scoring.score import existing_file, json_texts
from rl4lms_like.system.errors import MissingResourceError, import_extra

SIGMA = 6.0  # standard deviation of the Gaussian penalty for a difference in length, in bigrams
JAR = "spice-1.0.jar"
CORENLP_JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
OLDEST_JAVA = 8
NEWEST_JAVA = 14

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_DOWNLOAD = "python -c 'from pycocoevalcap.spice.get_stanford_models import get_stanford_models as get; get()'"
_CORENLP = "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"
_SHOWN = 2000
_INSTALL_JAVA = (
    "conda install -c conda-forge openjdk=11 (or install it any other way and set JAVA_HOME)",
    f"unpack a JDK of version {OLDEST_JAVA} to {NEWEST_JAVA} and set JAVA_HOME to its folder",
)
Ngram: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True)
class Frequencies:
    """Inverse document frequencies of n-grams."""

    weights: Mapping[Ngram, float]  # n-gram -> log(documents / documents that contain it)
    largest: float  # weight of an n-gram in one document, also used for an n-gram in none


def cider(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], frequencies: Frequencies | None = None
) -> list[float]:
    """Return CIDEr-D of each text, from 0 to 10; NaN for a text without references. Default: their own frequencies."""
    # Each distinct reference is tokenised and weighted once, whichever samples it belongs to.
    counts_of: dict[str, Counter[Ngram]] = {}
    for sample_references in references:
        counts_of |= {reference: _counts(reference) for reference in sample_references}
    if frequencies is None:
        documents = []
        for sample_references in references:
            if sample_references:
                documents.append([counts_of[reference] for reference in sample_references])
        frequencies = _frequencies(documents)
    vectors = {reference: _Vector(counts, frequencies) for reference, counts in counts_of.items()}

    # CIDEr-D(c, S) = 10 / m x the sum of the similarities of c to its m references S.
    scores = []
    for generated, sample_references in zip(generated_texts, references, strict=True):
        if not sample_references:
            scores.append(math.nan)
            continue
        vector = _Vector(_counts(generated), frequencies)
        total = sum(_similarity(vector, vectors[reference]) for reference in sample_references)
        scores.append(10 * total / len(sample_references))
    return scores


def frequencies_of_file(path: str) -> Frequencies:
    """Return the document frequencies of a file of references, read once per process unless it changes.

    Args:
        path: a `.jsonl` file has the references of one sample per line, as a text, a list of texts, or an object with
            `references`; any other file has one sample's only reference per line.

    Raises:
        ValueError: the file does not exist or has no references, or a line has another form.
    """
    file = existing_file(path, "references_file")
    return _frequencies_of_file(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2**15)
def tokens(text: str) -> tuple[str, ...]:
    """Return spaCy's tokens of a text, without white space."""
    return tuple(" ".join(token.text for token in _tokenizer()(text)).split())


class _Vector:
    """A text's n-grams by order with their weights, the norm of each vector, and the number of bigrams."""

    def __init__(self, counts: Counter[Ngram], frequencies: Frequencies) -> None:
        # g_k(c) = h_k(c) log(documents / documents with k). As in the published code, h_k is the plain count, not
        # divided by the length of the text, and the length of the penalty is in bigrams.
        self.weights: list[dict[Ngram, float]] = [{} for _ in range(ORDER)]
        self.n_bigrams = 0
        for ngram, count in counts.items():
            self.weights[len(ngram) - 1][ngram] = count * frequencies.weights.get(ngram, frequencies.largest)
            if len(ngram) == 2:
                self.n_bigrams += count

        self.norms: list[float] = []
        for weights in self.weights:
            self.norms.append(math.sqrt(sum(weight**2 for weight in weights.values())))


def _similarity(text: _Vector, reference: _Vector) -> float:
    """Return the mean over the orders of the clipped cosine, times the penalty for a difference in length."""
    # For the vectors c and s of one order:
    #     min(c, s) . s / (|c| |s|) x exp(-(l(c) - l(s))^2 / (2 sigma^2))
    # The minimum keeps a text from gaining by repeating an n-gram.
    total = 0.0
    for order in range(ORDER):
        if text.norms[order] and reference.norms[order]:
            weights = text.weights[order]
            expected = reference.weights[order]

            # `fsum`, because the order of a set is not the same in every process.
            shared = weights.keys() & expected.keys()
            product = math.fsum(min(weights[ngram], expected[ngram]) * expected[ngram] for ngram in shared)
            total += product / (text.norms[order] * reference.norms[order])

    return total / ORDER * math.exp(-((text.n_bigrams - reference.n_bigrams) ** 2) / (2 * SIGMA**2))


def _counts(text: str) -> Counter[Ngram]:
    return Counter(ngrams_to_4(tokens(text)))


@lru_cache(maxsize=4)
def _frequencies_of_file(file: Path, modified_ns: int) -> Frequencies:
    """Return the frequencies; the time of the last change is an argument so that a changed file is read again."""
    documents: list[list[str]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if file.suffix == ".jsonl":
                documents.append(json_texts(line, "references", f"{file}, line {number}", bare=True))
            else:
                documents.append([line.strip()])

    if not documents:
        raise ValueError(f"{file} has no references")
    return _frequencies(map(_counts_of_document, documents))


def _counts_of_document(document: Sequence[str]) -> list[Counter[Ngram]]:
    return [_counts(text) for text in document]


def _frequencies(documents: Iterable[Sequence[Counter[Ngram]]]) -> Frequencies:
    """Return the frequencies over documents; a document is the n-gram counts of one sample's references."""
    # By the set: an n-gram counts once per document, however many of its references contain it.
    n_documents_with: Counter[Ngram] = Counter()
    n_documents = 0
    for counts in documents:
        n_documents_with.update(set().union(*counts))
        n_documents += 1

    # log(documents / documents with it) as a difference, as in the published code.
    largest = math.log(max(1, n_documents))
    weights = {ngram: largest - math.log(count) for ngram, count in n_documents_with.items()}
    return Frequencies(weights, largest)


@cache
def _tokenizer() -> Any:
    import spacy

    return spacy.blank("en").tokenizer


def spice(
    generated_texts: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    java_memory: str = "8G",
    timeout: float = 1800.0,
) -> list[float]:
    """Return SPICE's F of each text, from 0 to 1; NaN for a text without references, 0 for a text without words.

    `java_memory` is the maximum heap size of Java, which is stopped after `timeout` seconds.

    Raises:
        MissingResourceError: see `require_spice`.
        RuntimeError: the program failed, or took too long.
    """
    scores = [math.nan] * len(references)
    for index, sample_references in enumerate(references):
        if sample_references:
            scores[index] = 0.0

    # One start of Java for all texts: it takes seconds to load the parser.
    request = _spice_request(generated_texts, references)
    if request:
        for result in _run(request, java_memory, timeout):
            scores[result["image_id"]] = _number(result["scores"]["All"]["f"])
    return scores


def _spice_request(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the input of the program, in its own keys: only texts with words, and their references with words."""
    request = []
    for index, (generated, sample_references) in enumerate(zip(generated_texts, references, strict=True)):
        reference_texts = [" ".join(tokens(reference)) for reference in sample_references if tokens(reference)]
        if tokens(generated) and reference_texts:
            request.append({"image_id": index, "test": " ".join(tokens(generated)), "refs": reference_texts})
    return request


def require_spice(needed_by: str) -> None:
    """Raise an error if the program cannot run, for constructors of components; nothing is downloaded.

    Raises:
        MissingExtraError: pycocoevalcap or spaCy is not installed.
        MissingResourceError: Java or CoreNLP's jars are missing; the message lists all of them.
    """
    libraries = _folder(needed_by) / "lib"
    missing: list[tuple[str, str, str]] = []  # resource, command that installs it, what to do offline

    # Java 15 has no JavaScript engine, with which the program writes its results.
    java = _java()
    version = _java_version(java) if java else None
    if version is None or not OLDEST_JAVA <= version <= NEWEST_JAVA:
        if java is None:
            problem = "none is found"
        elif version:
            problem = f"{java} is Java {version}"
        else:
            problem = f"{java} does not run"
        missing.append((f"Java {OLDEST_JAVA} to {NEWEST_JAVA} ({problem})", *_INSTALL_JAVA))

    jars = [name for name in CORENLP_JARS if not (libraries / name).is_file()]
    if jars:
        copy = f"copy {' and '.join(jars)} of {_CORENLP} to {libraries}"
        missing.append((f"CoreNLP 3.6.0 ({', '.join(jars)})", _DOWNLOAD, copy))

    if missing:
        resources, commands, offline = zip(*missing, strict=True)
        raise MissingResourceError(
            " and ".join(resources), needed_by=needed_by, command="; ".join(commands), offline="; ".join(offline)
        )


def _run(request: list[dict[str, Any]], java_memory: str, timeout: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="spice") as temporary_folder:
        # ASCII with escapes: Java reads files in the encoding of the system.
        input_file = Path(temporary_folder) / "in.json"
        output_file = Path(temporary_folder) / "out.json"
        input_file.write_text(json.dumps(request), encoding="ascii")

        folder = _folder("SPICE")
        command = [_java() or "java", f"-Xmx{java_memory}", "-jar", str(folder / JAR), str(input_file)]
        command += ["-out", str(output_file), "-cache", _parses(), "-silent"]
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"SPICE took more than {timeout:g} s for {len(request)} texts") from error

        # A file of a program that failed may be incomplete, and one that ended well may have written none.
        if result.returncode or not output_file.is_file():
            raise RuntimeError(f"SPICE failed (exit status {result.returncode}): {result.stderr[-_SHOWN:].strip()}")
        return json.loads(output_file.read_text(encoding="utf-8"))


@cache
def _parses() -> str:
    """Return the folder of the program's parses, kept until the process ends so that references are parsed once."""
    folder = tempfile.mkdtemp(prefix="spice_parses")
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)  # `atexit` does not run in a pool's workers
    return folder


def _folder(needed_by: str) -> Path:
    import_extra("spacy", extra="captions", needed_by=needed_by)
    package = import_extra("pycocoevalcap", extra="captions", needed_by=needed_by)
    return Path(package.__path__[0]) / "spice"


def _java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")


@cache
def _java_version(java: str) -> int | None:
    try:
        message = subprocess.run([java, "-version"], capture_output=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None

    # `version "1.8.0_392"` is Java 8, `version "11.0.21"` Java 11.
    version = _VERSION.search(message.stderr + message.stdout)
    return int(version[1]) if version else None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
