# Ingle with its server and the four official plugins.
#
#   docker build -t ingle:0.1.0 .                               for NVIDIA cards
#   docker build -t ingle:0.1.0-cpu --build-arg VARIANT=cpu .   without CUDA and triton
#   docker run --gpus all -p 2242:2242 -v ~/models:/models ingle:0.1.0 --model /models/llama-3-70b-awq
#
# tools/container.py runs these steps without a container engine and fails when they do not work.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
# cuda or cpu
ARG VARIANT=cuda
# Where torch comes from; empty takes the variant's own place.
ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt LICENSE ./
RUN python3 -m venv /opt/ingle
RUN case "$VARIANT" in \
      cuda) index=https://pypi.org/simple ;; \
      cpu) index=https://download.pytorch.org/whl/cpu ;; \
      *) echo "VARIANT must be cuda or cpu, got '$VARIANT'" >&2; exit 1 ;; \
    esac; \
    /opt/ingle/bin/pip install --no-cache-dir -c constraints.txt --index-url "${TORCH_INDEX:-$index}" torch
COPY core core
COPY server server
COPY plugins plugins
RUN extra=; test "$VARIANT" = cpu || extra=[triton]; \
    /opt/ingle/bin/pip install --no-cache-dir -c constraints.txt "./core$extra" ./server ./plugins/quant_awq ./plugins/quant_gptq ./plugins/quant_exl2 ./plugins/kv_fp8
RUN /opt/ingle/bin/pip check
# What only torch's own tests need, and pip, which nobody runs in a container: 150 MB.
RUN rm -rf /opt/ingle/lib/python3*/site-packages/torch/test; \
    rm -f /opt/ingle/lib/python3*/site-packages/torch/bin/*test*; \
    /opt/ingle/bin/pip uninstall --yes --quiet pip
RUN /opt/ingle/bin/ingle plugins --strict-plugins

FROM ${BASE}
ARG VARIANT=cuda
# Triton compiles a small launcher per kernel the first time it runs: a C compiler and libc headers. On
# a CPU PACKAGES=g++ lets single-token steps run compiled, 1.6 times as fast for 0.2 GB.
ARG PACKAGES=
RUN packages="$PACKAGES"; test "$VARIANT" = cpu || packages="$packages gcc libc6-dev"; \
    test -z "$packages" || { apt-get update && apt-get install -y --no-install-recommends $packages && rm -rf /var/lib/apt/lists/*; }
RUN useradd --create-home --uid 1000 ingle
COPY --from=build /opt/ingle /opt/ingle
LABEL org.opencontainers.image.title="Ingle" \
      org.opencontainers.image.description="An LLM inference engine for the card you own, where formats are plugins" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/ingle/bin:/usr/local/bin:/usr/bin:/bin \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER ingle
WORKDIR /home/ingle
EXPOSE 2242
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:2242/health', timeout=4)"]
ENTRYPOINT ["ingle", "serve", "--host", "0.0.0.0"]
