# docker build -t rewired .
# docker run --rm -it --gpus all -v "$PWD:/work" rewired convert --help
FROM python:3.11

# bubblewrap is the sandbox of `evaluate --run-model-code`, and in a container it needs --cap-add SYS_ADMIN
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*

COPY . /opt/rewired
RUN pip install --no-cache-dir '/opt/rewired[adapt,gguf]'
WORKDIR /work
