# gpumix with torch for NVIDIA cards: docs/install.md
FROM python:3.12-slim

# By default the build of PyPI, for Turing and newer; older cards: docs/install.md.
ARG TORCH="torch>=2.11"
ARG TORCH_INDEX="https://pypi.org/simple"
ARG EXTRAS="trainer,trl,peft"

# A compiler, for Triton and for torch.compile; ssh, for runs over several hosts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential openssh-client \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "$TORCH" --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple
COPY pyproject.toml README.md CHANGELOG.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[$EXTRAS]" && rm -r /src

CMD ["gpumix", "--help"]
