# For CPUs. For GPUs take the base nvidia/cuda:13.0.0-runtime-ubuntu24.04 with python3, leave out the CPU index below, add the
# extra `kernels`, and run with `--gpus all` and `--device cuda`.
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 recguide
WORKDIR /srv
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY kernels kernels
# torch first, from the index of builds without CUDA: recguide itself only asks for a version.
RUN pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch && \
    pip install --no-cache-dir --constraint constraints.txt ".[serve,grammar]"

USER recguide
ENV OMP_WAIT_POLICY=PASSIVE HF_HOME=/home/recguide/.cache/huggingface
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
# The check above is for port 8000. SIGTERM drains. In a container the server must listen on all of its addresses; it does so with RECGUIDE_API_KEY only.
ENTRYPOINT ["recguide", "serve", "--host", "0.0.0.0"]
CMD ["recguide-tiny"]
