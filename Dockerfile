# CPU by default (name the index of torch's CPU builds, unless pip's own indexes have them: the default build that is
# taken otherwise runs on a CPU too, but brings gigabytes of CUDA libraries):
#
#   docker build -t rl4lms-like --build-arg TORCH_INDEX_URL=<index of CPU builds> .
#
# CUDA: torch's wheels carry CUDA themselves, so their index is enough; who compiles kernels names an image that has the
# toolkit as well (with Python 3.10 or newer as `python3`, and its venv module):
#
#   docker build -t rl4lms-like --build-arg TORCH_INDEX_URL=<index of CUDA builds> [--build-arg BASE_IMAGE=<image>] .
#
# Run: docker run --rm [--gpus all] -v "$PWD/results:/app/results" rl4lms-like train --config_path task_configs/...
# A shell in it: docker run -it --rm --entrypoint bash rl4lms-like

ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# The index of the torch build to take; empty: a CPU build where pip's own indexes have one, else their default.
ARG TORCH_INDEX_URL=""

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

RUN command -v make >/dev/null || { apt-get update && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*; }

WORKDIR /app

# Dependencies first: this layer stays while only the sources change.
COPY Makefile constraints.txt ./
RUN make .venv/.torch TORCH_INDEX_URL="${TORCH_INDEX_URL}"

COPY . .
RUN make .venv/.installed

# What rewards and metrics need beyond the core (`rl4lms-like list metrics` says which needs what), for instance
#   --build-arg EXTRAS=lexical,semantic --build-arg NLTK_RESOURCES="punkt_tab wordnet" \
#   --build-arg APT_PACKAGES=default-jre-headless
ARG EXTRAS=""
ARG NLTK_RESOURCES=""
ARG APT_PACKAGES=""
RUN [ -z "${APT_PACKAGES}" ] || { apt-get update && apt-get install -y --no-install-recommends ${APT_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; }
RUN [ -z "${EXTRAS}" ] || .venv/bin/python -m pip install -c constraints.txt -e ".[${EXTRAS}]"
RUN [ -z "${NLTK_RESOURCES}" ] || { .venv/bin/python -m pip install -c constraints.txt nltk \
    && .venv/bin/python -c "import nltk, sys; place = '/usr/local/share/nltk_data'; \
        sys.exit(not all(nltk.download(name, download_dir=place) for name in sys.argv[1:]))" ${NLTK_RESOURCES}; }

ENV PATH="/app/.venv/bin:${PATH}"
ENTRYPOINT ["rl4lms-like"]
CMD ["--help"]
