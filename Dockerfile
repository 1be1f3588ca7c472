# Ingle with its server and the four official plugins.
#
#   docker build -t ingle .                                   torch with CUDA, from PyPI
#   docker build -t ingle:cpu --build-arg \
#     TORCH_INDEX=https://download.pytorch.org/whl/cpu .      torch for CPUs, 3 GB smaller
#   docker run --gpus all -p 2242:2242 -v /models:/models ingle --model /models/llama-3-70b-awq
#
# tools/container.py runs these steps without a container engine and fails when they do not work.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
WORKDIR /src
COPY constraints.txt LICENSE ./
RUN python3 -m venv /opt/ingle
RUN /opt/ingle/bin/pip install --no-cache-dir -c constraints.txt --index-url ${TORCH_INDEX} torch
COPY core core
COPY server server
COPY plugins plugins
RUN /opt/ingle/bin/pip install --no-cache-dir -c constraints.txt ./core[triton] ./server ./plugins/quant_awq ./plugins/quant_gptq ./plugins/quant_exl2 ./plugins/kv_fp8
RUN /opt/ingle/bin/pip check
RUN /opt/ingle/bin/ingle plugins --strict-plugins

FROM ${BASE}
# Triton compiles a small launcher per kernel the first time it runs: a C compiler and libc headers.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ingle
COPY --from=build /opt/ingle /opt/ingle
ENV PATH=/opt/ingle/bin:/usr/local/bin:/usr/bin:/bin \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER ingle
WORKDIR /home/ingle
EXPOSE 2242
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:2242/health', timeout=4)"]
ENTRYPOINT ["ingle", "serve", "--host", "0.0.0.0"]
