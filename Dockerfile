# An image for GPU machines. The development base has nvcc, which DeepSpeed compiles its operations with; its CUDA is
# that of the pinned torch.
#
#   docker build -t finetune .
#   docker run --gpus all --ipc host -v "$PWD:/workspace" -v finetune-cache:/cache finetune recipe=qwen8b_lora
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/finetune
RUN make -C /opt/finetune install VENV=/opt/venv EXTRAS=kernels,trackers PIP_NO_CACHE_DIR=1
ENV PATH=/opt/venv/bin:$PATH \
    HF_HOME=/cache/huggingface \
    FINETUNE_CACHE=/cache/finetune
WORKDIR /workspace
ENTRYPOINT ["finetune"]
