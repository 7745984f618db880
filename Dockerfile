# warploom with what needs no GPU, and with what launches where `--gpus all` gives one.
#   docker build -t warploom .
#   docker run --rm warploom doctor
#   docker run --rm --gpus all -v "$PWD:/work" warploom run silu_gemm.py:silu_gemm --on gpu
FROM python:3.12-slim

# The emulation compiles C++, and says which lines a fault is of by addr2line.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils g++ \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir '/src[gpu]' && rm -rf /src

WORKDIR /work
ENTRYPOINT ["warploom"]
CMD ["--help"]
